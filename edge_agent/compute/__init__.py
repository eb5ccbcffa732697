"""The processes and the thread that compute, and ONNX Runtime.

``worker`` starts and watches child processes and a thread. ``training_jobs``: what a trainer does. ``trainer`` is the
child that loads torch, ``onnx_trainer`` trains without it, ``adapter`` is the child that runs the graph ``adapt``.
``trained_update`` encodes an update. ``onnx_session`` opens a session from a graph and weights. ``measure_speed``
measures FLOP/s.
"""
