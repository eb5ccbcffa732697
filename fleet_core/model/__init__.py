"""What a model is outside torch: its layout, its graphs, and its weights as bytes.

``layout`` names the input, the classes and the arrays. ``graph_bundle`` holds the ONNX graphs. ``codecs`` turn arrays
into bytes and back (fp32, int8), with the lost part kept by the sender. ``golden`` are the arrays that a graph is
checked with. ``hypernetwork`` makes weights from a vector (pFedHN). Numpy only.
"""
