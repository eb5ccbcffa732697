"""Compares finished runs.

``finished_runs`` reads the runs and ``comparison`` compares them. ``tables``, ``comparison_charts`` and ``html_page``
present the comparison, ``comparison_files`` writes it to files.
"""
