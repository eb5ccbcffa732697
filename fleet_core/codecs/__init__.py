"""Codecs: named float32 arrays as bytes, for updates and for models. Numpy only.

``interface``: what a codec is. ``registry``: all of them by name. One file per codec: ``fp32``, ``int8``,
``half_precision``, ``int8_channel``, ``int8_random``, ``int4``, ``ternary``, ``top_k``, ``low_rank``, ``random_mask``,
and ``drawn_weights`` for a fleet's first model.
``safetensors_payload`` and ``frame``: the two wire formats. ``vector`` and ``quantize``: arithmetic that several share.
``payloads``: encode, decode, error feedback, deltas and identities of models. ``encoded_update``: an update with what
its codec lost. ``choose``: the codec of a round under ``auto``.
"""
