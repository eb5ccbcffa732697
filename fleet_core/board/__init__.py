"""Boards: a data file each, what the machine at hand really has, and what an agent may do on it. No torch."""
