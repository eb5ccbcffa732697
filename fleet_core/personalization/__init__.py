"""How a device answers by its own samples, without torch.

``nearest`` has class means and neighbours, ``gaussian_process`` and ``linear_head`` the other ways,
``gradient_steps`` what the graph ``adapt`` is asked. ``unknown_class`` tells a sample that is of no known class.
``plain_baseline`` is what a device could do without the fleet. ``device_bundle`` is all of it as a folder or one
file. Numpy only.
"""
