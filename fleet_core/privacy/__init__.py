"""Private updates: bounds on a device's update, noise that hides it, and sums that reveal no single update.

``settings`` is the table ``[privacy]`` and its conflicts with other settings. ``gaussian`` is differential privacy for
fleets and simulations: clipping and Gaussian noise. ``accountant`` turns rounds into epsilon. ``secure_sum`` is secure
aggregation, without I/O: ``secure_participant`` a device's side, ``secure_collector`` the aggregator's; ``shamir``
shares its secrets, ``masks`` hide numbers that are summed.
"""
