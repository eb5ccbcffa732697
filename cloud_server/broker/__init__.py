"""The broker and what the aggregator says through it.

``private_broker`` starts mosquitto or the embedded amqtt (``embedded``), ``mosquitto_config`` writes its
configuration, ``requirements`` says what a broker must allow. ``publisher`` sends retained chunks and manifests at
the broker's pace.
"""
