"""Labelled samples of a device: readers, splits, episodes and the heartbeat data set. numpy only."""
