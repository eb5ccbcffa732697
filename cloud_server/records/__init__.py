"""What the aggregator stores: the ledger, checkpoints, the spool of updates and the fleet's folder.

``fleet_folder`` reads fleet.toml and defines the paths, ``tariff`` reads tariff.toml. ``ledger`` is one SQLite file,
``ledger_tables`` has its tables and ``ledger_sums`` adds up its rows. ``spool`` holds the verified updates of the open
round, ``checkpoint`` the state after each closed round. ``disk_errors`` tells a full disk from a damaged file.
"""
