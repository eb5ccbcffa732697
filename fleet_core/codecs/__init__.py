"""What every codec is made of; the codecs are in ``kinds``. A codec turns named float32 arrays into bytes. Numpy only.

``interface``: what a codec is. ``frame`` and ``safetensors_payload``: the two wire formats. ``vector`` and
``quantize``: arithmetic that several share. ``no_update``: the note of a device that sends no update.
"""
