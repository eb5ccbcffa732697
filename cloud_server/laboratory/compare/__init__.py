"""Compares finished runs.

``finished_runs`` reads runs, ``comparison`` computes, ``tables``, ``comparison_charts`` and ``html_page`` show,
``comparison_files`` writes.
"""
