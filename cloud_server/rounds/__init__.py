"""The round: select, publish, collect until the deadline, apply. ``coordinator`` is the loop.

``broadcast`` makes and signs the manifest, ``uploads`` grants chunks, ``update_receiver`` checks, accepts or refuses,
``server_rule`` closes the round, ``round_costs`` turns reports into bytes and joules of a round, ``members`` knows
who belongs and who is there, ``waiting`` decides how long to wait. ``aggregator`` retries when the disk is full.
"""
