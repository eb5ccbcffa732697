"""The aggregator: rounds, registry, ledger, report and the operator's command line."""
