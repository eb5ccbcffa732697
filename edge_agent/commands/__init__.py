"""``edge-agent``, the device's command line, and what its commands do.

``start`` is the program's entry point, ``cli`` declares the commands, and each command that is more than a few lines
has a file. Nothing outside this room imports it.
"""
