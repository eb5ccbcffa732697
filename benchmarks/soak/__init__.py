"""A fleet under churn for hundreds of rounds: what grows in memory, descriptors, retained topics and on the disk.

``churn`` runs the processes and disturbs them, ``sampling`` measures them after each round, ``growth`` says what grows,
``page`` writes the page. ``jumping_clock`` is an agent whose clock jumps. ``python -m benchmarks.soak`` does all.
"""
