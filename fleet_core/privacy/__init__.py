"""Differential privacy: bounds a device's update, hides it in noise, and says what that is worth.

``settings`` is the table ``[privacy]`` and what it goes together with. ``gaussian`` is the rule, which fleets and
simulations call: clipping, and Gaussian noise. ``accountant`` turns rounds into epsilon.
"""
