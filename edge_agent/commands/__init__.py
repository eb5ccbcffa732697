"""``edge-agent``, the device's command line, and its commands.

``cli`` and ``board_commands`` declare the commands with the parser of ``arguments``, the other files implement them.
Nothing outside this room imports it.
"""
