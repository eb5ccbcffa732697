"""A model outside torch: its layout, its ONNX graphs, and weights and updates as bytes. Numpy only.

``layout``: input, classes and named arrays. ``graph_bundle``: the ONNX graphs. ``train_graph``: the gradient as a
graph. ``golden_arrays``: inputs and outputs that a graph is checked with. ``hypernetwork``: makes weights from an
embedding (pFedHN). ``payloads``: weights through a codec, with error feedback; deltas and identities of models.
``encoded_update``: an update with what its codec lost. ``choose_codec``, ``choose_frozen``: codec and arrays of the
next round. ``select_arrays``: arrays by patterns. ``skipped_updates``: when an update is too small to be sent.
"""
