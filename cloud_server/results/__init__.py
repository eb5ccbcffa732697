"""The results of a run as figures: result.json, bills, warnings.

``result`` builds result.json from the ledger, ``outcome`` reads and compares it, ``round_choices`` reads which codecs
and arrays each round had, ``folded_rounds`` the sums of rounds that are not kept. ``device_costs`` adds up a device's
costs, ``bill`` computes their monthly cost and their price. ``evaluations`` writes and reads what devices evaluated,
``verdict`` warns about useless answers, ``accuracy_drop`` says when a served model costs devices accuracy.
``cloud_server.reports`` shows all of it.
"""
