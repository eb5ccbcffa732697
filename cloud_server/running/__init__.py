"""Runs a fleet: the aggregator as a process, the demo, a fleet in one process, a systemd service; and backs one up.

``first_settings`` writes a fleet.toml for given samples; ``method_catalogue`` describes the methods and
``codec_catalogue`` the codecs.
"""
