"""This device: its state on the disk, its samples, its board and its program's version.

``state`` is everything that the agent keeps between rounds. ``slots`` are the two places (A/B) of what answers.
``local_samples`` is the device's own data. ``manifest_method`` reads the method that a manifest names. No torch.
"""
