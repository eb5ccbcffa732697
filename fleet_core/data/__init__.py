"""Labelled samples: readers, checks, splits, episodes, partitions and named data sets. Numpy only.

``samples`` loads and checks files, with the help of ``readers``; ``unlabelled`` loads samples to be answered.
``model_input`` describes a model's input for given samples; ``prepare`` makes such samples of images and
sound, with the help of ``shaping``, and ``live`` of readings as they come. ``time_split``, ``episodes`` and
``partitions`` divide samples. ``sets`` are the named data sets, ``heartbeat`` the one that ships with the package.
"""
