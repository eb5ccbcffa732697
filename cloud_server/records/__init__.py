"""What the aggregator keeps: the ledger, checkpoints, the spool of updates and the fleet's folder.

``fleet_folder`` reads fleet.toml and knows the paths. ``ledger`` is one SQLite file, ``ledger_tables`` its tables.
``spool`` holds the verified updates of the open round, ``checkpoint`` the state after each closed one.
"""
