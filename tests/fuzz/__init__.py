"""Coverage-guided fuzzing of every parser of outside bytes.

``targets`` names the parsers and their first inputs, ``run`` fuzzes them with atheris in processes of their own
(``python -m tests.fuzz.run``), ``test_fuzz`` does so with 200,000 inputs, and changes single bytes of the first inputs.
"""
