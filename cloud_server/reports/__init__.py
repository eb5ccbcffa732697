"""What users see of a fleet: report.html, tables and the live view on the terminal.

``html_report`` renders result.json, ``terminal_view`` follows a running fleet. ``cost_tables`` and ``html_costs`` show
costs, ``codec_tables`` and ``array_tables`` the codecs and arrays of rounds, ``privacy_tables`` the epsilon of private
updates. ``cloud_server.results`` has the figures.
"""
