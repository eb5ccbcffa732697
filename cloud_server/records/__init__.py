"""What the aggregator stores: the ledger, checkpoints, the spool of updates and the fleet's folder.

``fleet_settings`` has the keys of fleet.toml, ``fleet_folder`` reads it and defines the paths, ``tariff`` reads
tariff.toml. ``ledger`` is one SQLite file, ``ledger_tables`` has its tables, ``ledger_statements`` reads and writes
their rows, ``ledger_sums`` adds them up. ``spool`` holds the verified updates of the open round, ``checkpoint`` the
state after each closed round. ``disk_errors`` tells a full disk from a damaged file.
"""
