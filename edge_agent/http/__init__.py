"""Answers over HTTP by the Open Inference Protocol v2 (docs/serving.md), and the agent's figures.

``serve`` starts the server. ``http_server`` has the sockets, ``client_limits`` what a client may use, ``http_messages``
parses and writes HTTP, ``inference_protocol`` and ``tensors`` turn requests into answers. ``access`` has token and TLS.
``metrics`` answers Prometheus.
"""
