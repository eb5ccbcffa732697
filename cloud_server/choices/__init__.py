"""What there is to choose from, and a first choice: methods, codecs, data sets, boards.

``method_catalogue`` describes the methods, ``codec_catalogue`` the codecs. ``datasets`` and ``profiles`` are commands
that list data sets and boards. ``first_settings`` writes a fleet.toml for given samples.
"""
