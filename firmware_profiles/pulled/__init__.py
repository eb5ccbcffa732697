"""Programs that devices fetch themselves, for devices that SSH cannot reach.

``update_package`` makes the signed package that is announced. On the device ``update.sh`` checks, installs and goes
back with the functions of ``device.sh`` in the room ``ssh``; ``mender.sh`` makes it an Update Module for Mender.
"""
