"""Boards and what an agent may do on them. No torch.

``profile`` reads a board's data file, ``catalogue`` finds it, ``probe`` says what the present machine has, and
``limits`` follow from both. ``device_settings`` reads device.toml, in which
``source_settings`` are the sensors. ``allocator`` gives freed memory back.
"""
