"""What every other room builds on: errors, untrusted input, files, processes and the terminal.

``errors`` is the tree of all errors. ``schema`` and ``config`` read mappings and TOML and report every mistake at
once. ``storage`` writes files that are whole or absent. ``trees`` is arithmetic on named arrays of numpy or torch.
The others start processes, space out retries, compress, and print. All of it may be imported from anywhere; it
imports no room.
"""
