"""What devices and aggregator share: protocol, link, models, codecs, algorithms, data, power and the training loop."""

__version__ = "0.1.0"
