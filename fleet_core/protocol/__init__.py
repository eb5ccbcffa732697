"""The protocol between devices and the aggregator (docs/protocol.md).

``messages`` encodes and decodes JSON, also with the words of ``dictionary-1.txt``; ``round_messages``,
``device_messages`` and ``secure_messages`` define the messages; ``topics`` are their MQTT topics. ``chunks`` cuts blobs
and reassembles them, ``chain_message`` lists deltas. ``signing`` signs manifests, ``succession`` leads devices to a new
key, ``program_statement`` describes a signed program, ``certificates`` and ``enrolment_token``
identify devices, ``cohort`` selects who takes part in a round. Imports ``base`` only.
"""
