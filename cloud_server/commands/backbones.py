"""``metafleet backbone``, and the options of ``metafleet init`` for a frozen backbone.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import JSON
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, installed

if TYPE_CHECKING:
    from export.backbones.from_onnx import Preprocessing
    from fleet_core.backbone.backbone_file import BackboneFile
    from fleet_core.data.samples import Samples
    from fleet_core.model.layout import Backbone, InputSpec

backbone_app = typer.Typer(help="Frozen backbones: models that others trained, whose features a fleet learns on.",
                           no_args_is_help=True)

BACKBONE = Annotated[str | None, typer.Option("--backbone", metavar="SOURCE", help="A frozen network before the model: "
                                              "FILE.onnx, a file of 'metafleet backbone make', timm:NAME, torchvision:"
                                              "NAME, or weights for --backbone-build.")]
OUTPUT = Annotated[str | None, typer.Option("--backbone-output", metavar="NODE", help="The node whose values are the "
                                            "features; default: the backbone's first output.")]
BUILD = Annotated[str | None, typer.Option("--backbone-build", metavar="MODULE:FUNCTION", help="The function that "
                                           "builds the backbone in torch; --backbone then names its weights "
                                           "(safetensors or TorchScript).")]
INT8 = Annotated[bool, typer.Option("--backbone-int8", help="Quantize the backbone, calibrated with --data.")]


@dataclass(frozen=True)
class Wanted:
    """The options of ``init``."""

    source: str | None = None
    output: str | None = None
    build: str | None = None
    int8: bool = False


def applied(
    wanted: Wanted, fleet: Path, samples: Samples, spec: InputSpec
) -> tuple[Samples, InputSpec, Backbone | None]:
    """(samples, input of the model, backbone): features, if there is a backbone, whose file is then written to the
    fleet's folder. Raises FleetError."""
    if wanted.source is None:
        if wanted.output or wanted.build or wanted.int8:
            raise ConfigError("--backbone-output, --backbone-build and --backbone-int8 need --backbone",
                              hint="give --backbone")
        return samples, spec, None
    from fleet_core.backbone import backbone_file, features
    from fleet_core.base import storage

    path = fleet / backbone_file.NAME
    data = backbone_file.pack(_of_samples(wanted, samples))
    if not (fleet / "fleet.toml").exists():
        storage.write_atomic(path, data)
    found = features.Features(path, backbone_file.described(data))
    processes.say(f"features of {len(samples)} samples by {found.backbone.name} …")
    with_features = found.samples(samples, keep=False)
    raw = replace(found.backbone.input, fit=spec.fit, sound_hz=spec.sound_hz, rate_hz=spec.rate_hz,
                  stride=spec.stride)
    return with_features, features.input_of(with_features.x), replace(found.backbone, input=raw)


def _of_samples(wanted: Wanted, samples: Samples) -> BackboneFile:
    with installed("export"):
        from export.backbones.from_onnx import Preprocessing  # needs onnx
    prepared = Preprocessing(samples.x.dtype.name, shape=tuple(samples.x.shape[1:]))
    made = _made(wanted.build or wanted.source or "", wanted.source if wanted.build else None, prepared, wanted.output)
    return _int8(made, samples) if wanted.int8 else made


def _int8(made: BackboneFile, samples: Samples) -> BackboneFile:
    if made.info.int8 is not None:
        return made
    from export.backbones.quantize import quantized

    small = quantized(made, samples.x)
    processes.say(f"int8: {len(small.onnx)} bytes in place of {len(made.onnx)}, features off by {small.info.int8:.3g} "
                  "of their length")
    return small


def _made(source: str, weights: str | None, prepared: Preprocessing, output: str | None) -> BackboneFile:
    """The backbone of any source. weights: a file for a function that builds a module."""
    from fleet_core.backbone import backbone_file

    path = Path(source)
    with installed("export"):
        from export.backbones import from_onnx, from_torch  # need torch and onnx
    if weights is not None or (not path.exists() and ":" in source):
        return from_torch.from_torch(source, None if weights is None else Path(weights), prepared, output)
    if path.suffix == ".safetensors" and path.is_file():
        if output is not None:
            raise ConfigError("is a finished backbone, which has one output", where=source, hint="leave the output out")
        return backbone_file.read(path)
    if not path.is_file():
        raise ConfigError("is not a file", where=source,
                          expected="FILE.onnx, a file of 'metafleet backbone make', timm:NAME or torchvision:NAME")
    return from_onnx.from_onnx(path, prepared, output)


@backbone_app.command("make")
def make(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="FILE.onnx, MODULE:FUNCTION, timm:NAME, torchvision:"
                                          "NAME, or the folder of a fleet, whose encoder is taken.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="A new file, NAME.safetensors.")],
    weights: Annotated[Path | None, typer.Option(help="For MODULE:FUNCTION: a safetensors or TorchScript file.")]
    = None,
    output: Annotated[str | None, typer.Option(metavar="NODE", help="The node whose values are the features; default: "
                                               "the first output.")] = None,
    shape: Annotated[str | None, typer.Option(metavar="N,N,N", help="Shape of a sample, if the source leaves it open.")]
    = None,
    dtype: Annotated[str | None, typer.Option(metavar="float32|uint8", help="Type of the samples; default: the "
                                              "source's.")]
    = None,
    scale: Annotated[float | None, typer.Option(help="Multiply samples by this; default: 1/255 for bytes.")] = None,
    mean: Annotated[str | None, typer.Option(metavar="X,X,X", help="Then subtract these, by channel.")] = None,
    std: Annotated[str | None, typer.Option(metavar="X,X,X", help="Then divide by these, by channel.")] = None,
    int8: Annotated[Path | None, typer.Option("--int8", metavar="DATA", help="Quantize the backbone, calibrated with "
                                              "these samples.")] = None,
    as_json: JSON = False,
) -> None:
    """Make the file of a frozen backbone, for 'metafleet init --backbone' and for experiments."""
    from fleet_core.backbone import backbone_file
    from fleet_core.base import storage

    if to.exists() or to.suffix != ".safetensors":
        raise ConfigError("exists already" if to.exists() else "is not a backbone's file name", where=str(to),
                          expected="a new file, NAME.safetensors")
    if (Path(source) / "fleet.toml").exists():
        made = _of_fleet(Path(source))
    else:
        with installed("export"):
            from export.backbones.from_onnx import Preprocessing  # needs onnx
        sizes = tuple(map(int, _numbers("--shape", shape))) or None
        prepared = Preprocessing(dtype, scale, _numbers("--mean", mean), _numbers("--std", std), sizes)
        made = _made(source, None if weights is None else str(weights), prepared, output)
    if int8 is not None:
        from fleet_core.data import samples

        spec = made.info.input
        made = _int8(made, samples.load(int8, dtype=spec.dtype, shape=spec.shape))
    data = backbone_file.pack(made)
    storage.write_atomic(to, data)
    _show(data, as_json)


def _numbers(option: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise ConfigError(f"{option} {text}", expected="numbers with commas between them") from error


def _of_fleet(folder: Path) -> BackboneFile:
    """The encoder of a fleet's served model."""
    from cloud_server.records.read_served_model import place_of, served_model
    from fleet_core.model import graph_bundle

    fleet, file = place_of(folder)
    graph = graph_bundle.unpack(fleet.graph_bytes())
    _, params = served_model(fleet, file, graph.layout)
    with installed("export"):
        from export.backbones.of_encoder import of_encoder  # needs onnx
    return of_encoder(graph, params, fleet.config.fleet.name)


@backbone_app.command("show")
def show(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A backbone's file, or an ONNX file.")],
    as_json: JSON = False,
) -> None:
    """Show a backbone's input, features, size and speed on this machine, or the nodes of an ONNX file."""
    from fleet_core.backbone import backbone_file
    from fleet_core.base import storage

    if path.suffix != ".onnx":
        return _show(storage.read_bytes(path, limit=backbone_file.MAX_BYTES), as_json, path)
    with installed("export"):
        from export.backbones.from_onnx import nodes  # needs onnx
    found = nodes(path)
    if as_json:
        return terminal.show([{"operator": kind, "node": name} for kind, name in found])
    terminal.table(found, ("operator", "node"))


def _show(data: bytes, as_json: bool, path: Path | None = None) -> None:
    """path: the file, to measure its speed on this processor."""
    from fleet_core.backbone import backbone_file, providers
    from fleet_core.backbone.onnx_runtime import CPU, open_on

    found = backbone_file.parsed(data)
    choice, _ = providers.choose(found, (CPU,), lambda provider: open_on(found.onnx, provider))
    info, facts = found.info, dict[str, Any]()
    facts = {"id": backbone_file.identity(data), "bytes": len(data), **schema.plain(info),
             "ms_per_sample": choice.seconds[CPU] * 1000}
    if as_json:
        return terminal.show(facts)
    kind = "float32" if info.int8 is None else f"int8, features off by {info.int8:.3g} of their length"
    print(f"{info.name}: {info.input.dtype} {list(info.input.shape)} to {info.width} features of '{info.output}', "
          f"{len(data)} bytes, {kind}")
    print(f"{facts['ms_per_sample']:.3g} ms a sample on this processor, with one thread; id {facts['id']}")
