"""torch models -> ONNX graph bundles, and the checks that a graph must pass before it is published.

``first_model`` makes what a fleet starts from, ``full_bundle`` a bundle. ``graph`` exports a model, ``adapt_graph`` the
steps that personalize, ``train_graph`` the gradient that devices train with; ``method_steps`` adds a method's steps,
``int8_encoder`` a quantized encoder. ``trace`` makes graphs of functions, ``lowering`` has the operations that torch's
exporter lacks, ``loops`` the loops around a gradient, ``second_derivatives`` what is differentiated twice. ``gate``
compares a graph with torch.
"""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # before onnxruntime is imported: from 1.29 on it sends telemetry
