"""What every other room builds on; it imports none of them.

``errors``: the error classes. ``schema``, ``config``: validation of mappings and TOML. ``storage``: atomic file writes
and named arrays on disk. ``trees``: arithmetic on named arrays of numpy or torch. ``moving_arrays``: which of them
a round trains. ``error_bounds``: a figure with its bounds. ``processes``: exit codes, signals. ``backoff``: intervals
between retries. ``compression``: zstd. ``terminal``: command-line options and tables.
"""
