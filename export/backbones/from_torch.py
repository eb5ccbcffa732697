"""A torch module as a frozen backbone: exported to ONNX once, on the operator's machine.

``package.module:function`` builds a module without arguments, whose weights are in a safetensors or TorchScript file;
``torchvision:NAME`` and ``timm:NAME`` are models of these packages with the weights that they come with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import onnx
import onnx_ir as ir
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from export.backbones.from_onnx import Preprocessing, of_model
from export.graph import IR_VERSION, OPSET, quiet, root_cause
from fleet_core.backbone.backbone_file import MAX_BYTES, BackboneFile
from fleet_core.base.errors import ConfigError

PACKAGES = ("torchvision", "timm")
"""Packages whose models have names here, such as ``torchvision:resnet18``."""

CLASSIFIERS = ("fc", "classifier", "heads", "head")
"""The last part of a torchvision model, which tells its own classes apart."""

IMAGE = (3, 224, 224)


def is_named(source: str) -> bool:
    """Whether this is a name such as ``timm:resnet18``."""
    return source.partition(":")[0] in PACKAGES


def from_torch(
    build: str, weights: Path | None, prepared: Preprocessing, output: str | None = None
) -> BackboneFile:
    """The backbone that ``build`` makes. weights: its file; None for a named model, or a function that loads its own.
    prepared: its ``shape`` must be given unless the model is named. Raises ConfigError."""
    if is_named(build):
        module, prepared = _named(build, prepared)
    else:
        module = _built(build)
    if weights is not None:
        module = _loaded(module, weights)
    if prepared.shape is None:
        raise ConfigError("the shape of a sample is not known", where=build, hint="--data, or --shape")
    return of_model(_exported(module, prepared.shape, build), prepared, output, build, build)


def _built(build: str) -> nn.Module:
    package, colon, name = build.partition(":")
    if not colon:
        raise ConfigError(f"'{build}' is not a function", expected="package.module:function")
    try:
        made = cast(Callable[[], Any], getattr(importlib.import_module(package), name))()
    except (Exception, SystemExit) as error:  # the user's code
        raise ConfigError(f"'{build}' builds nothing: {error}", hint=f"is the package of '{package}' here?") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"'{build}' builds a {type(made).__name__}", expected="a torch.nn.Module")
    return made


def _loaded(module: nn.Module, weights: Path) -> nn.Module:
    """The module with the weights of a safetensors file; or the TorchScript file itself."""
    if not weights.is_file() or weights.stat().st_size > MAX_BYTES:
        raise ConfigError("is not a file of weights", where=str(weights), expected=f"at most {MAX_BYTES} bytes")
    try:
        if weights.suffix == ".safetensors":
            module.load_state_dict(load_file(weights))
        else:
            stored: Any = torch.jit
            module.load_state_dict(stored.load(weights, map_location="cpu").state_dict())
    except Exception as error:  # torch raises errors of many classes
        raise ConfigError(f"does not fit the module: {root_cause(error)[:300]}", where=str(weights),
                          expected="a .safetensors or TorchScript file of its state_dict") from error
    return module


def _named(name: str, prepared: Preprocessing) -> tuple[nn.Module, Preprocessing]:
    """(a model of a package without its classifier, the preprocessing that its weights were trained with)."""
    package, _, model = name.partition(":")
    try:
        return {"torchvision": _of_torchvision, "timm": _of_timm}[package](model, prepared)
    except ModuleNotFoundError as error:
        raise ConfigError(f"'{error.name}' is not installed", where=name, hint=f"pip install {package}") from error
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ConfigError(f"{package} has no such model or weights: {error}", where=name) from error


def _of_torchvision(name: str, prepared: Preprocessing) -> tuple[nn.Module, Preprocessing]:
    models: Any = importlib.import_module("torchvision.models")
    weights = models.get_model_weights(name).DEFAULT
    module, tuned = models.get_model(name, weights=weights), weights.transforms()
    last = next((part for part in CLASSIFIERS if hasattr(module, part)), None)
    if last is None:
        raise ConfigError("has no classifier to leave out", where=name, hint="use a function of yours")
    setattr(module, last, nn.Identity())
    return module, _tuned(prepared, tuple(tuned.mean), tuple(tuned.std))


def _of_timm(name: str, prepared: Preprocessing) -> tuple[nn.Module, Preprocessing]:
    timm: Any = importlib.import_module("timm")
    module = timm.create_model(name, pretrained=True, num_classes=0)
    tuned = timm.data.resolve_model_data_config(module)
    shape = prepared.shape or tuple(tuned["input_size"])
    return module, _tuned(replace(prepared, shape=shape), tuple(tuned["mean"]), tuple(tuned["std"]))


def _tuned(prepared: Preprocessing, mean: tuple[float, ...], std: tuple[float, ...]) -> Preprocessing:
    """``prepared``, with the values of the weights where the user gives none; images are bytes."""
    return replace(prepared, shape=prepared.shape or IMAGE, mean=prepared.mean or mean, std=prepared.std or std,
                   dtype=prepared.dtype or "uint8")


class _Features(nn.Module):
    """The module, with a copy of its output: the exporter needs an output that is not the input itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).clone()


def _exported(module: nn.Module, shape: tuple[int, ...], build: str) -> onnx.ModelProto:
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        with quiet():
            program = torch.onnx.export(
                _Features(module.eval()), (x,), dynamo=True, opset_version=OPSET, verbose=False, input_names=["image"],
                output_names=["features"], dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            )  # fmt: skip
    except Exception as error:  # torch.export raises whatever the module's code makes it raise
        raise ConfigError(f"cannot be exported: {root_cause(error)[:300]}", where=build,
                          hint="forward(x) must not branch on the values of x") from error
    if program is None:
        raise ConfigError("cannot be exported", where=build)
    program.model.ir_version = min(program.model.ir_version or IR_VERSION, IR_VERSION)
    return ir.to_proto(program.model)
