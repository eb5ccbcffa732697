"""The round: select, publish, collect until the deadline, apply. ``coordinator`` is the loop,
``aggregator_parts`` builds it.

``operator_requests`` carries out what commands ask for. ``received_messages`` hands each message of a device to the
part that handles it: ``uploads`` grants chunks, ``update_receiver`` accepts or refuses updates. ``server_rule`` applies
a round's updates, ``decide_roll_back`` returns to an earlier model. ``budget`` and ``privacy_budget`` end the run,
``keep_rounds`` folds old rounds. ``secure_round`` takes an open round through the steps of secure aggregation.
``cloud_server.running`` imports this room.
"""
