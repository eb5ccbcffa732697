"""Energy: sensors and meters, a board's energy model, and joules per phase of work. No torch."""
