"""Private updates: what a device's update is bounded to, which noise hides it, and sums without single updates.

``settings`` is the table ``[privacy]`` and what it goes together with. ``gaussian`` is differential privacy, which
fleets and simulations call: clipping, and Gaussian noise. ``accountant`` turns rounds into epsilon. ``secure_sum`` is
secure aggregation, without I/O: ``secure_participant`` a device's side, ``secure_collector`` the aggregator's;
``shamir`` shares its secrets, ``masks`` hide numbers that are summed.
"""
