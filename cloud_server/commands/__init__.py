"""``metafleet``, the operator's command line. ``cli`` declares it; each group of commands has a file.

What a command needs is imported when it is called, so that ``--help`` stays quick. The commands about devices and
flashing are in ``cloud_server.devices``.
"""
