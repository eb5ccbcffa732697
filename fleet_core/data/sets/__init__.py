"""The named data sets: ``registry`` lists them, ``fetch`` and ``download`` get them, ``set_cache`` keeps them.

The readers of the original files: ``cifar``, ``har``, ``idx`` (MNIST and its like), ``omniglot``, ``shakespeare`` and
``spoken``; ``archives`` unpacks with limits.
"""
