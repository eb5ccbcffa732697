"""Devices that send false updates: what each robust rule holds against, and what it costs without them.

``grid`` names data, methods, rules and attacks; ``attacks`` makes a run's devices hostile; ``cell`` runs one and
measures it; ``tables`` writes README.md from result.json; ``__main__`` is the command.
``live`` runs cells as fleets of processes, in which ``hostile_agent`` is a hostile agent.
"""
