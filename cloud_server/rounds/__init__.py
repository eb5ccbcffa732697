"""The round: select, publish, collect until the deadline, apply. ``coordinator`` is the loop, ``parts`` builds it.

``received_messages`` passes on what devices send: ``uploads`` grants chunks, ``update_receiver`` checks, accepts
or refuses, ``round_costs`` adds up bytes and joules. ``server_rule`` closes the round. ``members`` knows who belongs
and who is on, ``waiting`` how long to wait, ``budget`` and ``privacy_budget`` when to stop, ``reputation`` who is
refused in most rounds. ``cloud_server.running`` imports it.
``secure_round`` takes an open round through the steps of secure aggregation.
"""
