"""The ledger: rounds, devices, updates, bytes, joules and evaluations of a fleet in one SQLite file.

``ledger`` opens it, ``ledger_tables`` has its tables, ``ledger_statements`` reads and writes their rows,
``ledger_sums`` adds them up. ``fold_rounds`` folds old rounds into the sums of ``folded_tables``. ``reported_costs``
turns the counters that devices report into rows. ``disk_errors`` distinguishes a full disk from a damaged file.
"""
