"""Frozen backbones of models that others trained.

``from_onnx`` reads an ONNX file, checks it and makes the file that devices get; ``from_torch`` exports a torch module;
``quantize`` makes it int8.
"""
