"""Programs that the device fetches itself, without rights: what installs them is root's ``update.sh``.

``program_updates`` follows what the fleet announces, ``update_folder`` is what it leaves for root, with the answer.
``partial_file`` keeps the chunks that are there over a power cut; they come over MQTT, or by ``https_download``.
"""
