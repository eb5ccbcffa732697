"""What stands between the updates of a round and the server rule: which are used, and as what.

``screening`` is what aggregator and simulation call when a round closes: first ``norm_bound`` refuses updates far above
the usual norm, then the rule of ``settings`` drops or changes some. The rules: ``clip``, ``median``
(and the trimmed mean), ``krum``, ``history``. ``interface`` is what a rule gets and returns, ``blocks`` walks over the
arrays of all updates in bounded memory.
"""
