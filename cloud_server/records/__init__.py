"""What the aggregator stores beside the ledger: checkpoints, the spool of updates and the fleet's folder.

``fleet_settings`` defines the keys of fleet.toml, ``fleet_folder`` reads the fleet's folder, ``tariff`` reads
tariff.toml. ``spool`` stores the verified updates of the open round, ``checkpoint`` the state after each closed round;
``read_served_model`` reads the served model from it. ``training_graph`` reads the graph for training without torch.
"""
