"""The package that a device gets: the program with its wheels, settings, token and systemd unit.

``device_file`` reads DEVICE.toml, ``program`` collects the wheels, ``program_cache`` stores them, ``device_package``
puts everything together, ``install.sh`` runs on the device.
"""
