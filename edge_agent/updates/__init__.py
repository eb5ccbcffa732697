"""Programs that the device fetches itself, without root's rights: root's ``update.sh`` installs them.

``program_updates`` follows what the fleet announces, ``update_folder`` is what it leaves for root, with the answer.
``partial_file`` keeps received chunks over a power cut; they come over MQTT, or by ``https_download``.
"""
