"""Boards: their data files, what the present machine has, and the limits for an agent on it. No torch."""
