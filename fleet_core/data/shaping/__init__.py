"""Turns what sensors give into samples of the shape that a fleet has, by the same functions in training and on devices.

``resize`` brings images to one size, ``resample`` series to one rate; ``sound`` makes spectrograms.
"""
