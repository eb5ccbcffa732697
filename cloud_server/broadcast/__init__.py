"""What a round sends to devices. ``cloud_server.rounds`` builds and calls its parts; the simulation imports
``models_down``, ``served_model`` and ``round_arrays``.

``manifest`` builds and signs the message that opens a round. ``models_down`` encodes the training models,
``delta_chain`` selects the deltas of earlier rounds for devices that missed some, ``served_model`` encodes the models
that devices answer with, ``round_codecs`` chooses each round's codecs, ``round_arrays`` the arrays that it trains.
``open_round`` is the state of the round that is open. ``program_waves`` announces programs that devices fetch.
"""
