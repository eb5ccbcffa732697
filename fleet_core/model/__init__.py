"""A model outside torch: its layout, its ONNX graphs, and its weights as bytes. Numpy only.

``layout``: input, classes and named arrays. ``graph_bundle``: the ONNX graphs. ``golden``: inputs and outputs that a
graph is checked with. ``hypernetwork``: makes weights from an embedding (pFedHN).
"""
