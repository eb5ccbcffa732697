"""torch -> ONNX graph bundles, and the gate that a graph passes before anyone gets it."""
