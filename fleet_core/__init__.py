"""What both ends of the wire agree on: messages, link, codecs, algorithms, data, power and the one training loop."""

__version__ = "0.1.0"
