"""Figures as text and pictures, of fleets and simulations alike.

``scores`` computes accuracy and macro-F1. ``formatting`` writes figures with units. ``charts`` draws SVG;
``html_elements`` and ``html_style`` are parts of pages, ``live_display`` redraws a terminal.
"""
