"""A whole fleet running: the aggregator as a process, the demo, a fleet in one process, a backup.

``first_settings`` writes a fleet.toml that fits a file of samples; ``method_catalogue`` describes the methods.
"""
