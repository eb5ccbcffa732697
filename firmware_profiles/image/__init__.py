"""A card or an image with the agent in it: partitions, file systems, first boot, writing and reading back.

``image_plan`` decides what is written where, ``card_image`` makes the image, by ``partition_files``, without root.
``first_boot`` makes the files that set up the system. ``write_card`` writes an image to a card, ``block_device``
refuses a disk that is in use. ``stream`` reads an image, ``disk_partitions``, ``fat`` and ``root_system`` what is in
it.
"""
