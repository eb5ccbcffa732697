"""Programs that the device fetches itself, without root's rights: root's ``update.sh`` installs them.

``program_updates`` follows the fleet's announcements, ``update_folder`` holds the files that the agent leaves for root,
and root's answer. ``partial_file`` keeps received chunks over a power cut; they come over MQTT, or by
``https_download``.
"""
