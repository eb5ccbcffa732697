"""The codecs, one file each: ``fp32``, ``half_precision``, ``int8``, ``int8_channel``, ``int8_random``, ``int4``,
``ternary``, ``top_k``, ``low_rank``, ``random_mask``, and ``drawn_weights`` for a fleet's first model. ``registry``
names them; nothing else here is imported from outside.
``common_scale`` is that of secure aggregation.
"""
