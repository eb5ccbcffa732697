"""``edge-agent``, the device's command line. Nothing outside this room imports it.

``cli`` and ``board_commands`` declare the commands with the parser of ``arguments``. ``run`` builds and runs the agent,
``device_commands`` asks and shows it, ``review`` takes late labels, ``install`` checks a bundle, ``verify`` a program's
signature, ``doctor`` compares board and machine, ``energy`` reads watts. ``watchdog`` tells systemd that the agent
lives, ``online_note`` tells the flashing command that the agent is back.
"""
