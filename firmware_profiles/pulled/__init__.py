"""Programs that devices fetch themselves, where no SSH reaches.

``update_package`` is what is signed and announced. On the device ``update.sh`` checks, installs and goes back, by the
functions of the room ``ssh``'s ``device.sh``; ``mender.sh`` makes an Update Module for Mender of it.
"""
