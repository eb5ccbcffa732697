"""Meta-learning methods as pure functions on named arrays; neither numpy nor torch is imported here."""
