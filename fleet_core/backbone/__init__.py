"""Frozen backbones: raw samples to features by an ONNX file that every device gets once. Numpy and onnxruntime.

``backbone_file`` is the file that travels, with its golden outputs. ``onnx_runtime`` imports onnxruntime; ``providers``
chooses what computes. ``features`` turns raw samples into features, everywhere by the same code; ``feature_cache``
keeps them on the disk.
"""
