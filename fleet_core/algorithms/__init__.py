"""Federated and meta-learning methods as pure functions on named arrays. Imports neither numpy nor torch.

``interface``: the two rules that a method consists of. ``methods``: the methods. ``plugins``: those of other packages.
``freezing``: the rules on the arrays that move in a round. ``aggregation``: reproducible sums. ``optimizers``: Adam and
Yogi. ``step_measures``: constants in a step's loss.
"""
