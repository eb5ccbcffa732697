"""``edge-agent``, the device's command line, and its commands.

``start`` is the program's entry point, ``cli`` and ``board_commands`` declare the commands, the other files implement
them. Nothing outside this room imports it.
"""
