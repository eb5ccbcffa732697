"""Frozen backbones of models that others trained.

``from_onnx`` reads an ONNX file, checks it and makes the file that devices get; ``from_torch`` exports a torch module;
``of_encoder`` takes the encoder of a fleet's own model. ``quantize`` makes it int8.
"""
