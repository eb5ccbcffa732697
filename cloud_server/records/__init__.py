"""What the aggregator stores beside the ledger: checkpoints, the spool of updates and the fleet's folder.

``fleet_settings`` has the keys of fleet.toml, ``fleet_folder`` reads it and defines the paths, ``key_files`` reads
private keys, which may have a passphrase, ``signing_keys`` has the fleet's key and its successor, ``tariff`` reads
tariff.toml. ``spool`` holds the verified updates of the open round, ``checkpoint`` the state after each closed round;
``read_served_model`` reads the served model from it. ``training_graph`` keeps the graph that devices train with.
``update_record`` stores the progress of an update of the devices' programs.
"""
