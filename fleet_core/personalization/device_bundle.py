"""Writes and reads the bundles of ``bundle_format``, as a folder or as one file.

Reading accepts no file that the manifest does not list, enforces the size limits, and checks the manifest's signature
and every sha256 before a file is parsed. It does not run the graphs: that check needs onnxruntime and is elsewhere.
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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.algorithms.plugins import OR_INSTALL
from fleet_core.backbone import backbone_file
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import BundleError, CodecError, ConfigError, FleetError, StateError
from fleet_core.base.trees import Params
from fleet_core.model import golden_arrays, graph_bundle, payloads
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.personalization.bundle_format import (
    BACKBONE,
    FORMAT,
    GOLDEN,
    GRAPHS,
    INT8,
    LIMITS,
    MANIFEST,
    MAX_BYTES,
    RATES,
    SIGNATURE,
    SIGNED_AS,
    STORED,
    SUFFIX,
    WEIGHTS,
    Bundle,
    FileInfo,
    Manifest,
)

if TYPE_CHECKING:
    from fleet_core.protocol.signing import Signer

LOCK = ".writing"


# Writing -------------------------------------------------------------------------------------------------------------


def write(
    path: Path, made: Bundle, *, check: Callable[[Path], None] = lambda place: None, signer: Signer | None = None
) -> None:
    """Writes a bundle atomically, as one file when ``path`` ends in ``.bundle``, else as a folder.

    signer: has the key that the manifest names; None writes an unsigned bundle, which devices refuse by default.
    check: called with the temporary path of the written bundle before it is renamed to ``path``; when it raises,
    nothing is left. Temporary folders of processes that were killed while writing are deleted. Raises ConfigError when
    ``path`` exists, StateError when the disk refuses.
    """
    refuse_existing(path)
    files = _files(made)
    if signer is not None:
        line = signer.sign(SIGNED_AS + files[MANIFEST]).partition(b"\n")[0]
        files[SIGNATURE] = line + b"\n"
    with _temporary_folder(path) as folder:
        place = folder / path.name
        if path.suffix == SUFFIX:
            storage.write_atomic(place, _container(files))
        else:
            for name, data in files.items():
                storage.write_atomic(place / name, data)
        check(place)
        refuse_existing(path)
        storage.move(place, path)


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside ``path``, deleted afterwards. Raises StateError.

    Its file ``LOCK`` is locked while this process lives; the file is locked before it gets that name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(path)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(path)) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").rename(folder / LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _delete_abandoned(path: Path) -> None:
    """Deletes the temporary folders beside ``path`` whose processes have ended."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.????????"):
        with contextlib.suppress(OSError), (left / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
            if not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)


def refuse_existing(path: Path) -> None:
    """Raises ConfigError when ``path`` exists."""
    if path.exists():
        raise ConfigError("exists already", where=str(path), hint="use another path, or delete it first")


def _files(made: Bundle) -> dict[str, bytes]:
    """The bundle's files by name, the manifest first."""
    stored = STORED[made.manifest.model.stored]
    model, rates = _without_rates(made.params), trees.only(made.params, ("rates",))
    files = {GRAPHS[kind]: data for kind, data in made.graph.graphs.items()}
    weights = storage.flatten(made.graph.layout.ordered({**model, **made.graph.first}))
    files[WEIGHTS] = storage.pack({key: _stored(key, array, stored) for key, array in weights.items()})
    if rates:
        files[RATES] = storage.pack(storage.flatten(rates))
    if made.graph.adapt:
        files[GRAPHS["adapt"]] = made.graph.adapt
    if made.int8:
        files[INT8] = made.int8
    if made.backbone:
        files[BACKBONE] = made.backbone
    files[GOLDEN] = golden_arrays.pack(made.graph.golden)
    known = {name: FileInfo(len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())}
    return {MANIFEST: _manifest_bytes(replace(made.manifest, files=known)), **files}


def _stored(key: str, array: Any, dtype: str) -> Any:
    with np.errstate(over="ignore"):
        found = array.astype(dtype)
    if not np.isfinite(found).all():
        raise BundleError(f"array {key} holds a value too large for {dtype}", hint="store the weights as fp32")
    return found


def as_stored(params: Params, stored: str) -> dict[str, dict[str, Any]]:
    """Float32 weights, rounded as storing them as ``stored`` does. Raises BundleError for a value too large for it."""
    kept = {key: _stored(key, a, STORED[stored]) for key, a in storage.flatten(_without_rates(params)).items()}
    again = storage.unflatten({key: array.astype(np.float32) for key, array in kept.items()})
    return {**again, **trees.only(params, ("rates",))}


def _without_rates(params: Params) -> Params:
    return {group: named for group, named in params.items() if group != "rates"}


def _manifest_bytes(manifest: Manifest) -> bytes:
    return (json.dumps(schema.plain(manifest), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _container(files: Mapping[str, bytes]) -> bytes:
    return storage.pack({name: np.frombuffer(data, np.uint8) for name, data in files.items()})


# Reading -------------------------------------------------------------------------------------------------------------


def read(path: Path, *, signed: bool = False, accept: Callable[[Manifest], object] = lambda manifest: None) -> Bundle:
    """Reads a bundle, a folder or one file.

    signed: refuse a bundle without a signature; a wrong signature is always refused. accept: called with the manifest
    before any other file is parsed; it may raise an error to refuse the bundle. Raises BundleError that says which file
    is wrong, and how.
    """
    try:
        files = _files_of_folder(path) if path.is_dir() else _files_of_container(path)
        return _parse(files, str(path), signed, accept)
    except (StateError, CodecError) as error:
        where = f"{path}: {error.where}" if error.where and not error.where.startswith(str(path)) else error.where
        raise BundleError(error.what, where=where or str(path), expected=error.expected, hint=error.hint) from error


def _files_of_folder(folder: Path) -> dict[str, bytes]:
    names = sorted(entry.name for entry in folder.iterdir())
    _refuse_unknown(names, str(folder))
    for name in names:
        if not (folder / name).is_file():
            raise BundleError("is not a regular file", where=str(folder / name))
    return {name: storage.read_bytes(folder / name, limit=LIMITS[name]) for name in names}


def _files_of_container(path: Path) -> dict[str, bytes]:
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


def _parse(
    files: dict[str, bytes], where: str, signed: bool, accept: Callable[[Manifest], object]
) -> Bundle:
    data, signature = files.pop(MANIFEST), files.pop(SIGNATURE, None)
    manifest = _manifest(data, f"{where}/{MANIFEST}")
    if signature is not None:
        _check_signature(signature, data, manifest.key, where)
    elif signed:
        raise BundleError(f"has no {SIGNATURE}", where=where, expected="a bundle that 'metafleet export' signed",
                          hint="--unsigned, if you know who made it")
    accept(manifest)
    _check_files(files, manifest, where)
    arrays: dict[str, Any] = {
        f"graph/{kind}": np.frombuffer(files[name], np.uint8) for kind, name in GRAPHS.items() if name in files
    }
    golden = golden_arrays.unpack(files[GOLDEN], f"{where}/{GOLDEN}")
    arrays |= {f"golden/{name}": array for name, array in golden.items()}
    model, own = _weights(files[WEIGHTS], manifest)
    arrays |= {f"first/{key}": array for key, array in storage.flatten(own).items()}
    graph = graph_bundle.assemble(manifest.layout, manifest.graph, arrays)
    found = Bundle(manifest, graph, {**model, **_rates(files, manifest)}, files.get(INT8, b""), signature is not None,
                   files.get(BACKBONE, b""))
    _check_method(found, where)
    return found


def _manifest(data: bytes, where: str) -> Manifest:
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError("is not JSON", where=where, hint="get the bundle again") from error
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


def _check_signature(signature: bytes, manifest: bytes, key: str, where: str) -> None:
    """Raises BundleError unless ``key``, the fleet's, signed the manifest."""
    from fleet_core.protocol.signing import Verifier  # cryptography: memory that serving does not need

    try:
        Verifier(key).verify(signature.removesuffix(b"\n") + b"\n" + SIGNED_AS + manifest)
    except FleetError as error:
        raise BundleError(f"its signature {error.what.removeprefix('has a signature that ')}",
                          where=f"{where}/{SIGNATURE}", expected=error.expected,
                          hint="somebody has changed it: get the bundle again") from error


def _check_files(files: Mapping[str, bytes], manifest: Manifest, where: str) -> None:
    adds = {RATES: "rates" in METHODS[manifest.method.name].shared, INT8: manifest.int8 is not None,
            GRAPHS["adapt"]: manifest.graph.adapt is not None, BACKBONE: manifest.layout.backbone is not None}
    wanted = {WEIGHTS, GOLDEN, *(name for name, there in adds.items() if there)}
    wanted |= {GRAPHS[kind] for kind in METHODS[manifest.method.name].graphs}
    listed = set(manifest.files)
    problems = [
        *(f"{name} is missing" for name in sorted(listed | wanted) if name not in files),
        *(f"{name} is not listed" for name in sorted(files) if name not in listed),
        *(f"{name} does not belong here" for name, there in adds.items() if name in files and not there),
    ]  # fmt: skip
    for name in sorted(listed & set(files)):
        listing, data = manifest.files[name], files[name]
        if listing.size != len(data):
            problems.append(f"{name} has {len(data)} bytes, expected {listing.size}")
        elif hashlib.sha256(data).hexdigest() != listing.sha256:
            problems.append(f"{name} has another sha256 than the manifest lists")
    if problems:
        raise BundleError("; ".join(problems), where=where, hint="get the bundle again")


def _weights(data: bytes, manifest: Manifest) -> tuple[Params, Params]:
    """(groups of the served model, initial values of the groups that a device keeps)."""
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
    """Checks that manifest, graphs and weights match."""
    manifest, graph = found.manifest, found.graph
    steps, traced = manifest.adaptation, graph.info.adapt
    if (steps and (steps.groups, steps.rates)) != (traced and (traced.groups, traced.rates)):
        raise BundleError("the adaptation is not that of adapt.onnx", where=f"{where}/{MANIFEST}")
    identity = payloads.identity(found.params)
    if identity != manifest.model.id:
        raise BundleError(f"the weights are {identity}", where=f"{where}/{WEIGHTS}", expected=manifest.model.id)
    backbone = manifest.layout.backbone
    if backbone is not None and backbone_file.described(found.backbone, f"{where}/{BACKBONE}").id != backbone.id:
        raise BundleError("is not the layout's backbone", where=f"{where}/{BACKBONE}", expected=backbone.id)
    if found.hyper is None:
        raise BundleError("the method has no hyper-parameters", where=f"{where}/{MANIFEST}")
