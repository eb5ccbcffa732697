"""Coverage-guided fuzzing of every parser of outside bytes.

``targets`` names the parsers and their first inputs, ``run`` fuzzes one with atheris in a process of its own
(``python -m tests.fuzz.run``), ``test_fuzz`` does so for a minute and replays what is kept in ``corpus``.
"""
