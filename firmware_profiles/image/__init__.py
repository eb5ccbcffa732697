"""A card or an image with the agent in it: partitions, file systems, first boot, writing and reading back.

``card_image`` makes the image without root, ``card`` writes it, ``block_device`` refuses a disk that is in use.
"""
