"""Personalizers: how a device answers from its own samples. Numpy only.

``nearest``: class means and nearest neighbours. ``linear_head``, ``gaussian_process``: classifiers that are fitted to
embedded samples. ``ridge_head``: a head for numbers that is fitted to them. ``gradient_steps``: the number and rate of
the graph ``adapt``'s steps. ``unknown_class``: detects samples of no known class. ``mixture``: weighs several
ways by a device's own samples. ``drift``: notices that samples have moved, ``input_drift`` by their inputs.
``plain_baseline``: a classifier without the fleet. ``bundle_format``, ``device_bundle``: everything that a device
needs, as a folder or one file.
"""
