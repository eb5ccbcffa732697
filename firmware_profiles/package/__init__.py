"""The package that a device gets: the program with its wheels, settings, token and systemd unit.

``device_file`` reads DEVICE.toml, ``program`` collects the wheels, ``program_cache`` stores them, ``device_package``
puts everything together with the ``systemd_unit``, ``install.sh`` runs on the device. ``agent_wheel`` packs the agent,
``own_wheels`` are the user's, ``board_needs`` says what a board needs, ``progress_line`` shows how far it is,
``sbom`` lists what a program consists of, ``program_files`` its files with their hashes.
"""
