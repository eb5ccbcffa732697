"""The link to a broker, and small parts of HTTP that devices and operators share.

``interface`` is what a link is, ``mqtt`` connects and reconnects, ``mqtt_connection`` is one connection with
``paho_client``, ``loopback`` a broker in the process. ``await_broker`` waits for one, ``byte_counters`` counts.
``broker_password`` is the login at a broker. ``bearer_token`` and ``host_names`` check HTTP requests.
"""
