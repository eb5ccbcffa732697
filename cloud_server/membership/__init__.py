"""The devices of a fleet: which belong to it, which are on, which a round asks and waits for.

``members`` knows all devices, ``inability`` says why one cannot take part. ``training_states`` notices those that lost
the state of their training, ``quarantine`` excludes those whose updates are refused. ``readiness`` says whether a round
may open, ``waiting`` how long it then waits, and for whom.
"""
