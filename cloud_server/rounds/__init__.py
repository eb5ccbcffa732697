"""The round: select, publish, collect until the deadline, apply. ``coordinator`` is the loop, ``parts`` builds it.

``received_messages`` passes on what devices send: ``uploads`` grants chunks, ``update_receiver`` checks, accepts or
refuses. ``server_rule`` closes the round, ``decide_roll_back`` takes training back to an earlier model. ``members``
knows who belongs and who is on, ``quarantine`` who is asked no more, ``waiting`` how long to wait, ``budget`` and
``privacy_budget`` when to stop. ``secure_round`` takes an open round through the steps of secure aggregation.
``cloud_server.running`` imports it.
"""
