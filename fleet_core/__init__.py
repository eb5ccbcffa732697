"""What devices and aggregator share: protocol, link, models, algorithms, data, power and the training loop."""

__version__ = "0.1.0"
