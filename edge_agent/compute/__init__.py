"""The processes that compute, and ONNX Runtime.

``worker`` starts and watches child processes, ``trainer`` is the one that loads torch, ``adapter`` the one that runs
the graph ``adapt``. ``update`` encodes what was trained. ``onnx_session`` opens a session from a graph and weights.
"""
