"""A bundle as a person holds it: all that a device personalizes and answers with, as a folder or as one file.

    manifest.json             what it is, and the size and sha256 of every other file
    weights.safetensors       the served model, and the first values of groups that a device keeps, as ``group/name``
    rates.safetensors         learned rates (Meta-SGD), as ``rates/group.name``; always fp32
    embed.onnx, predict.onnx, adapt.onnx    the graphs of ``fleet_core.model.graph_bundle``, their parameters external
    embed-int8.onnx           the encoder once more, quantized, with its weights inside
    golden.npz                golden inputs and outputs, as ``fleet_core.model.graph_bundle`` has them

A name that ends in ``.bundle`` is the one file: a safetensors container with each of these files as a row of bytes
under its name. It has no paths, links, owners or permissions to guard against, as an archive would; its header is
bounded before it is parsed, and the parser is the one that a device reads every round's weights with.

Reading takes no file that the manifest does not list and nothing over its limit, and checks every sha256 before a file
is parsed. Nothing here needs onnxruntime: whether the graphs run is another check.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.algorithms.plugins import OR_INSTALL
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import BundleError, CodecError, ConfigError, StateError
from fleet_core.base.trees import Params
from fleet_core.model import codecs, golden, graph_bundle
from fleet_core.model.graph_bundle import GRAPH_GROUPS, Graph, GraphInfo
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.personalization.gradient_steps import Steps
from fleet_core.protocol.round_messages import MethodRef

FORMAT = 1
MANIFEST, WEIGHTS, RATES, GOLDEN, INT8 = (
    "manifest.json", "weights.safetensors", "rates.safetensors", "golden.npz", "embed-int8.onnx",
)  # fmt: skip
GRAPHS = {kind: f"{kind}.onnx" for kind in (*GRAPH_GROUPS, "adapt")}
STORED = {"fp32": "float32", "fp16": "float16"}
"""How weights lie on the disk; they are float32 wherever they are used."""

LIMITS: Mapping[str, int] = {
    MANIFEST: 8 << 20, WEIGHTS: 1 << 30, RATES: 1 << 30, GOLDEN: 64 << 20, INT8: 1 << 29,
    **dict.fromkeys(GRAPHS.values(), 64 << 20),
}  # fmt: skip
"""The largest size of each file that a bundle may hold, in bytes."""

MAX_BYTES = 2 << 30
SUFFIX = ".bundle"
WRITING = ".writing"


@dataclass(frozen=True)
class FileInfo:
    """size: in bytes."""

    size: int = field(metadata={"min": 1, "max": max(LIMITS.values())})
    sha256: str = field(metadata={"pattern": r"[0-9a-f]{64}"})


@dataclass(frozen=True)
class ModelInfo:
    """id: of the served weights as they are read, ``codecs.identity``. round: that they were evaluated after. stored:
    how they lie on the disk."""

    id: str = field(metadata={"pattern": r"[0-9a-f]{32}"})
    round: int = field(metadata={"min": 0, "max": 2**53})
    stored: str = field(metadata={"choices": tuple(STORED)})


@dataclass(frozen=True)
class Int8Info:
    """What the quantized encoder costs, measured on the data that it was calibrated with.

    accuracy: of class means over ``tasks`` few-shot tasks with ``shots`` samples of each class, by the encoder as it is
    (``fp32``) and quantized (``int8``), on ``queries`` answers each; calibrated: samples, none of them asked for.
    difference: between both encoders on the golden samples, relative to the length of the embeddings.
    """

    fp32: float = field(metadata={"min": 0.0, "max": 1.0})
    int8: float = field(metadata={"min": 0.0, "max": 1.0})
    tasks: int = field(metadata={"min": 1, "max": 1_000_000})
    shots: int = field(metadata={"min": 1, "max": 1_000_000})
    queries: int = field(metadata={"min": 1, "max": 1_000_000_000})
    calibrated: int = field(metadata={"min": 1, "max": 1_000_000_000})
    difference: float = field(metadata={"min": 0.0, "max": 10.0})


@dataclass(frozen=True)
class Manifest:
    """fleet: that trained it. key: the public key of its rounds, in hex. graph: tolerances, seed of the golden weights,
    ONNX and onnxruntime versions. adaptation: the gradient steps of a device, None where it takes none. files: all but
    this one."""

    format: int = field(metadata={"min": FORMAT, "max": FORMAT})
    fleet: str = field(metadata={"pattern": r"[A-Za-z0-9_-]{1,64}"})
    key: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    method: MethodRef
    model: ModelInfo
    adaptation: Steps | None
    graph: GraphInfo
    int8: Int8Info | None
    layout: Layout
    layout_hash: str = field(metadata={"pattern": r"[0-9a-f]{16}"})
    files: Mapping[str, FileInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory. params: the served model's groups, ``rates`` among them where they are learned; what a device
    keeps of its own is in ``graph.first``. int8: ONNX file with its weights inside, empty where there is none."""

    manifest: Manifest
    graph: Graph
    params: Params
    int8: bytes = b""

    @property
    def method(self) -> Method:
        return METHODS[self.manifest.method.name]

    @property
    def hyper(self) -> Any:
        """The method's hyper-parameters. Raises BundleError."""
        found, problems = schema.read(self.method.hyper, self.manifest.method.hyper)
        if found is None:
            raise BundleError("the method's hyper-parameters are malformed: " + "; ".join(map(str, problems[:5])))
        return found


# Writing -------------------------------------------------------------------------------------------------------------


def write(path: Path, made: Bundle, *, check: Callable[[Path], None] = lambda place: None) -> None:
    """A folder, or one file where ``path`` ends in ``.bundle``; whole or not at all.

    check(place): is called with the bundle as it lies on the disk, before it gets its name; an error leaves nothing.
    What a process that was killed has left of this bundle is deleted. Raises ConfigError where something is there
    already, StateError for a disk that does not take it.
    """
    refuse_what_is_there(path)
    files = _files(made)
    with _beside(path) as folder:
        place = folder / path.name
        if path.suffix == SUFFIX:
            storage.write_atomic(place, _contained(files))
        else:
            for name, data in files.items():
                storage.write_atomic(place / name, data)
        check(place)
        refuse_what_is_there(path)
        storage.move(place, path)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A folder beside ``path`` to write in, which is gone afterwards. Raises StateError.

    It holds the file ``WRITING``, locked as long as this process lives; the file is locked before it has that name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_left(path)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").rename(folder / WRITING)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_left(path: Path) -> None:
    """The folders beside ``path`` in which it was written by processes that do not live any more."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with contextlib.suppress(OSError), (left / WRITING).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused where one is at work
            if not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)


def refuse_what_is_there(path: Path) -> None:
    """Raises ConfigError where a bundle would replace something."""
    if path.exists():
        raise ConfigError("is there already", where=str(path), hint="take another path, or delete it first")


def _files(made: Bundle) -> dict[str, bytes]:
    """The bundle's files by name, the manifest first."""
    stored = STORED[made.manifest.model.stored]
    model, rates = _without_rates(made.params), trees.only(made.params, ("rates",))
    files = {GRAPHS[kind]: data for kind, data in made.graph.graphs.items()}
    files[WEIGHTS] = storage.pack({k: _stored(k, a, stored) for k, a in storage.flatten(_all(made, model)).items()})
    if rates:
        files[RATES] = storage.pack(storage.flatten(rates))
    if made.graph.adapt:
        files[GRAPHS["adapt"]] = made.graph.adapt
    if made.int8:
        files[INT8] = made.int8
    files[GOLDEN] = golden.pack(made.graph.golden)
    known = {name: FileInfo(len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())}
    return {MANIFEST: _text(replace(made.manifest, files=known)), **files}


def _all(made: Bundle, model: Params) -> Params:
    return made.graph.layout.ordered({**model, **made.graph.first})


def _stored(key: str, array: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if not np.isfinite(found).all():
        raise BundleError(f"array {key} holds a value that {dtype} does not", hint="store the weights as fp32")
    return found


def as_stored(params: Params, stored: str) -> dict[str, dict[str, Any]]:
    """Weights, float32, as they are once they have lain on the disk as ``stored``. Raises BundleError."""
    kept = {key: _stored(key, a, STORED[stored]) for key, a in storage.flatten(_without_rates(params)).items()}
    again = storage.unflatten({key: array.astype(np.float32) for key, array in kept.items()})
    return {**again, **trees.only(params, ("rates",))}


def _without_rates(params: Params) -> Params:
    return {group: named for group, named in params.items() if group != "rates"}


def _text(manifest: Manifest) -> bytes:
    return (json.dumps(schema.plain(manifest), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _contained(files: Mapping[str, bytes]) -> bytes:
    return storage.pack({name: np.frombuffer(data, np.uint8) for name, data in files.items()})


# Reading -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Bundle:
    """The bundle at ``path``, a folder or one file. Raises BundleError that says which file is wrong, and how."""
    try:
        return _parsed(_listed(path) if path.is_dir() else _taken_out(path), str(path))
    except (StateError, CodecError) as error:
        where = f"{path}: {error.where}" if error.where and not error.where.startswith(str(path)) else error.where
        raise BundleError(error.what, where=where or str(path), expected=error.expected, hint=error.hint) from error


def _listed(folder: Path) -> dict[str, bytes]:
    names = sorted(entry.name for entry in folder.iterdir())
    _refuse_unknown(names, str(folder))
    for name in names:
        if not (folder / name).is_file():
            raise BundleError("is no file", where=str(folder / name))
    return {name: storage.read_bytes(folder / name, limit=LIMITS[name]) for name in names}


def _taken_out(path: Path) -> dict[str, bytes]:
    arrays, _ = storage.unpack(storage.read_bytes(path, limit=MAX_BYTES), where=str(path))
    _refuse_unknown(sorted(arrays), str(path))
    for name, array in arrays.items():
        if array.dtype != np.uint8 or array.ndim != 1 or array.size > LIMITS[name]:
            raise BundleError(
                f"file {name} is {array.dtype} {list(array.shape)}", where=str(path),
                expected=f"at most {LIMITS[name]} bytes",
            )  # fmt: skip
    return {name: array.tobytes() for name, array in arrays.items()}


def _refuse_unknown(names: list[str], where: str) -> None:
    unknown = [name for name in names if name not in LIMITS]
    if unknown or MANIFEST not in names:
        what = f"holds {', '.join(unknown)[:200]}" if unknown else f"has no {MANIFEST}"
        raise BundleError(what, where=where, expected=f"a bundle: {', '.join(LIMITS)}", hint="metafleet export")


def _parsed(files: dict[str, bytes], where: str) -> Bundle:
    manifest = _manifest(files.pop(MANIFEST), f"{where}/{MANIFEST}")
    _check_files(files, manifest, where)
    arrays: dict[str, Any] = {
        f"graph/{kind}": np.frombuffer(files[name], np.uint8) for kind, name in GRAPHS.items() if name in files
    }
    arrays |= {f"golden/{name}": array for name, array in golden.unpack(files[GOLDEN], f"{where}/{GOLDEN}").items()}
    model, own = _weights(files[WEIGHTS], manifest)
    arrays |= {f"first/{key}": array for key, array in storage.flatten(own).items()}
    graph = graph_bundle.assemble(manifest.layout, manifest.graph, arrays)
    found = Bundle(manifest, graph, {**model, **_rates(files, manifest)}, files.get(INT8, b""))
    _check_method(found, where)
    return found


def _manifest(data: bytes, where: str) -> Manifest:
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError("is no JSON", where=where, hint="get the bundle again") from error
    manifest, problems = schema.read(Manifest, plain)
    if manifest is None:
        version = plain.get("format") if isinstance(plain, dict) else None
        newer = isinstance(version, int) and version > FORMAT
        raise BundleError(
            "is malformed: " + "; ".join(map(str, problems[:5])), where=where,
            hint="a newer metafleet made it: update this one" if newer else "get the bundle again",
        )  # fmt: skip
    if manifest.layout.hash != manifest.layout_hash:
        raise BundleError(
            f"its layout has the hash {manifest.layout.hash}", where=where, expected=manifest.layout_hash
        )
    method = METHODS.get(manifest.method.name)
    if method is None or method.version != manifest.method.version:
        near = schema.suggest(manifest.method.name, METHODS)
        raise BundleError(
            f"is of method {manifest.method.name}, version {manifest.method.version}, which is not known here"
            + (f" (did you mean '{near}'?)" if near and near != manifest.method.name else ""),
            where=where, hint=f"update metafleet{OR_INSTALL}",
        )  # fmt: skip
    return manifest


def _check_files(files: Mapping[str, bytes], manifest: Manifest, where: str) -> None:
    adds = {RATES: "rates" in METHODS[manifest.method.name].shared, INT8: manifest.int8 is not None,
            GRAPHS["adapt"]: manifest.graph.adapt is not None}
    wanted = {WEIGHTS, GOLDEN, *(name for name, there in adds.items() if there)}
    wanted |= {GRAPHS[kind] for kind in METHODS[manifest.method.name].graphs}
    listed = set(manifest.files)
    problems = [
        *(f"{name} is missing" for name in sorted(listed | wanted) if name not in files),
        *(f"{name} is not listed" for name in sorted(files) if name not in listed),
        *(f"{name} does not belong here" for name, there in adds.items() if name in files and not there),
    ]  # fmt: skip
    for name in sorted(listed & set(files)):
        told, data = manifest.files[name], files[name]
        if told.size != len(data):
            problems.append(f"{name} has {len(data)} bytes, expected {told.size}")
        elif hashlib.sha256(data).hexdigest() != told.sha256:
            problems.append(f"{name} has another sha256 than the manifest says")
    if problems:
        raise BundleError("; ".join(problems), where=where, hint="get the bundle again")


def _weights(data: bytes, manifest: Manifest) -> tuple[Params, Params]:
    """(the served model's groups, the first values of a device's own)."""
    shared, layout = METHODS[manifest.method.name].shared, manifest.layout
    arrays, _ = storage.unpack(data, where=WEIGHTS)
    there = {key.partition("/")[0] for key in arrays}
    groups = tuple(g for g in MODEL_GROUPS if g in there or (g in shared and layout.parameters((g,))))
    params = graph_bundle.checked_weights(arrays, layout, groups, STORED[manifest.model.stored])
    return trees.only(params, shared), {group: named for group, named in params.items() if group not in shared}


def _rates(files: Mapping[str, bytes], manifest: Manifest) -> Params:
    if RATES not in files:
        return {}
    wide = manifest.layout.extended(("rates",), METHODS[manifest.method.name].shared)
    return graph_bundle.checked_weights(storage.unpack(files[RATES], where=RATES)[0], wide, ("rates",))


def _check_method(found: Bundle, where: str) -> None:
    """What one file says of another is so."""
    manifest, graph = found.manifest, found.graph
    how, traced = manifest.adaptation, graph.info.adapt
    if (how and (how.groups, how.rates)) != (traced and (traced.groups, traced.rates)):
        raise BundleError("the adaptation is not that of adapt.onnx", where=f"{where}/{MANIFEST}")
    identity = codecs.identity(found.params)
    if identity != manifest.model.id:
        raise BundleError(f"the weights are {identity}", where=f"{where}/{WEIGHTS}", expected=manifest.model.id)
    if found.hyper is None:
        raise BundleError("the method has no hyper-parameters", where=f"{where}/{MANIFEST}")
