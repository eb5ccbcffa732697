"""Answers over HTTP by the Open Inference Protocol v2 (docs/serving.md).

``serve`` starts it, ``http_server`` has the sockets and bounds, ``http_messages`` parses and writes HTTP,
``inference_protocol`` and ``tensors`` translate requests into answers.
"""
