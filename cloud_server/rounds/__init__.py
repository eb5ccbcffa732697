"""The round: select, publish, collect until the deadline, apply. ``coordinator`` is the loop, ``parts`` builds it.

``manifest`` builds and signs the message that opens a round, ``models_down`` encodes the models. ``device_messages``
takes what devices send to its part: ``uploads`` grants chunks, ``update_receiver`` checks, accepts or refuses,
``round_costs`` adds up bytes and joules. ``server_rule`` closes the round. ``round_codecs`` knows its codecs,
``members`` who belongs and who is on, ``waiting`` how long to wait, ``budget`` when to stop. ``cloud_server.running``
imports it; the simulation imports ``models_down``.
"""
