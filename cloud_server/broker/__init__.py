"""The broker, and what the aggregator publishes.

``private_broker`` starts mosquitto or the embedded amqtt (``embedded``), ``mosquitto_config`` writes mosquitto's
configuration, ``requirements`` checks a broker's packet size. ``publisher`` publishes retained chunks and manifests,
``server_messages`` sends presence and answers to devices.
"""
