"""Frozen backbones: raw samples to features by an ONNX file that every device gets once. Numpy and onnxruntime.

``backbone_file`` is the file that travels, with its golden outputs. ``onnx_runtime`` imports onnxruntime; ``providers``
chooses what computes. ``features`` makes features of raw samples, the one way for every path; ``feature_cache`` keeps
them on the disk.
"""
