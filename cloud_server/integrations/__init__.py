"""A fleet in other programs.

``prometheus`` is an endpoint with the ledger's figures, ``grafana.json`` a dashboard of them, ``tracking`` writes
rounds for TensorBoard and MLflow, ``home_assistant`` shows devices there. ``alerts`` finds what needs a person's
attention, ``alert_senders`` sends messages about it.
"""
