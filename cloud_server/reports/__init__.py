"""What people see of a fleet: result.json, report.html, charts, tables on the terminal, warnings.

``result`` builds result.json from the ledger, ``html_report`` draws it, ``terminal_view`` follows a running fleet,
``verdict`` warns when answers are worth nothing, ``formatting`` writes figures with units, ``scores`` has macro-F1.
"""
