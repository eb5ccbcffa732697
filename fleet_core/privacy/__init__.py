"""Differential privacy: what a device's update is bounded to, which noise hides it, and what that is worth.

``settings`` is the table ``[privacy]`` and what it goes together with. ``gaussian`` is the rule, which fleets and
simulations call: clipping, and Gaussian noise. ``accountant`` turns rounds into epsilon.
``shamir`` shares a secret,
``masks`` hide numbers that are summed: parts of secure aggregation, which nothing calls yet.
"""
