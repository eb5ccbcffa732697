"""torch models -> ONNX graph bundles, and the checks that a graph must pass before it is published."""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported: from 1.29 on it sends telemetry
