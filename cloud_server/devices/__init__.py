"""The commands about devices: list, enrol and revoke them, flash them, and the boards that are known.

``flash`` is the command, ``prepare_flash`` reads the device file and makes the package, ``flash_over_ssh`` installs
it, ``back_online`` waits for the device to return. What is written to a card or a device is ``firmware_profiles``.
"""
