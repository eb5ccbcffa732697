"""Installing and updating a running device over SSH, one or many side by side.

``ssh_connection`` talks to OpenSSH, ``release`` sends what changed, ``remote`` runs ``device.sh`` on the device,
``remote_install`` goes through the steps and rolls back, ``inventory`` names the devices.
"""
