"""What a model answers, where it is not one of several classes. Numpy only.

``regression``: numbers in the user's unit, how they are scaled for training, and the measures of their errors.
"""
