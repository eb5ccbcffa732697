"""Lists the methods, codecs, data sets and boards that can be chosen, and makes the first settings.

``method_catalogue`` describes the methods, ``codec_catalogue`` the codecs. ``datasets`` and ``profiles`` are commands
that list data sets and boards. ``first_settings`` writes a fleet.toml for given samples.
"""
