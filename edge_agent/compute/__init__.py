"""The processes that compute, and ONNX Runtime.

``worker`` starts and watches child processes. ``trainer`` is the child that loads torch, ``adapter`` the one that runs
the graph ``adapt``. ``update`` encodes a trained update. ``onnx_session`` opens a session from a graph and weights.
``measure_speed`` measures FLOP/s.
"""
