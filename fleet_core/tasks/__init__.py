"""Tasks: what a model answers if its answer is not a class. Numpy only.

``regression``: numbers in the user's unit, how they are scaled for training, and the measures of their errors.
"""
