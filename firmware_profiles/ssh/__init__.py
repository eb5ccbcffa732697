"""Installs and updates running devices over SSH, one or several at the same time.

``ssh_connection`` runs OpenSSH, ``remote`` runs ``device.sh`` on the device, ``release`` is what is installed,
``remote_install`` goes through the steps and rolls back, ``inventory`` lists devices, ``side_by_side`` does several.
"""
