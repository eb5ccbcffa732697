"""What the operator asks of the aggregator and of devices: list, enrol, revoke and flash them, pause, question.

``flash`` is the command, ``prepare_flash`` reads the device file and makes the package, ``flash_over_ssh`` installs it
on a running device, ``back_online`` waits for that device to return, ``flash_in_waves`` does it for the console.
``firmware_profiles`` makes the files. ``programs`` lists the programs kept for flashing, ``updates`` lets
devices fetch one. ``pause``, ``roll_back`` and
``predict`` ask a running fleet, ``fleet_status`` reads what state it is in; command line and console use them.
"""
