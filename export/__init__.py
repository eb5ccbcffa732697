"""torch -> ONNX graph bundles, and the gate that a graph passes before anyone gets it."""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported: from 1.29 on it reports its use
