"""What users see of a fleet: result.json, report.html, tables on the terminal, warnings.

``result`` builds result.json from the ledger, ``outcome`` reads it, ``html_report`` renders it, ``terminal_view``
follows a running fleet, ``verdict`` warns about useless answers. ``device_costs`` adds up a device's costs, ``bill``
makes months and money of them, ``cost_tables`` and ``html_costs`` show them.
``codec_tables`` and ``array_tables`` show what ``round_choices`` reads: codecs and arrays of rounds.
"""
