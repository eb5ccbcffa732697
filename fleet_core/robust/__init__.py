"""Screens the updates of a round before the server rule: refuses, drops or changes some.

Aggregator and simulation call ``screening`` when a round closes: first ``norm_bound`` refuses updates far above the
usual norm (``returning_devices`` have a wider bound), then the rule of ``settings`` drops or changes some. The
rules: ``clip``, ``median`` (and the trimmed mean), ``krum``, ``history``. ``interface`` is what a rule gets and
returns, ``blocks`` walks over the arrays of all updates in bounded memory.
"""
