"""The commands about devices: list, enrol, revoke and flash them, and list the known boards.

``flash`` is the command, ``prepare_flash`` reads the device file and makes the package, ``flash_over_ssh`` installs
it on a running device, ``back_online`` waits for that device to return. ``firmware_profiles`` makes the files.
"""
