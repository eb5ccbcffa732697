"""Payloads: trees of arrays through a codec, with error feedback; models as deltas, and their identities."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base import storage, trees
from fleet_core.base.errors import CodecError, StateError
from fleet_core.base.trees import Params
from fleet_core.codecs.interface import Array, Seed
from fleet_core.codecs.kinds.drawn_weights import DrawnWeights
from fleet_core.codecs.kinds.registry import DRAWN, NOTHING, codec
from fleet_core.model.layout import Layout


def encode(name: str, params: Params, seed: Seed = (0,)) -> bytes:
    """Encodes arrays of any float dtype. seed: of a codec that draws. Raises CodecError for a value that is not finite
    in float32."""
    arrays: dict[str, Array] = {}
    for key, array in storage.flatten(params).items():
        with np.errstate(over="ignore"):  # a value too large for float32 becomes infinite and is refused
            arrays[key] = np.asarray(array, dtype=np.float32)
        if not np.isfinite(arrays[key]).all():
            raise CodecError(f"array {key} holds a value that is not finite")
    return codec(name).encode(arrays, seed)


def encode_whole(params: Params, seed: int, others: int = 0) -> tuple[str, bytes]:
    """(codec, bytes) of float32 weights, exact, which a device decodes without other weights. seed: of the fleet; for
    weights that were drawn from it only the seed is sent. others: number of values of the model that are not among
    them."""
    for name in DRAWN if others else (DrawnWeights.name,):
        with contextlib.suppress(CodecError):
            return name, encode(name, params, (seed, others))
    return "fp32", encode("fp32", params)


def decode(name: str, data: bytes, layout: Layout, groups: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Decodes a payload of ``encode`` to float32 arrays in the layout's order.

    The layout limits the memory that is taken. Raises CodecError for bytes that are not such a payload, arrays other
    than the layout's, and values that are not finite.
    """
    limit = max_bytes(name, layout, groups)
    if len(data) > limit:
        raise CodecError(f"a payload of {len(data)} bytes", expected=f"at most {limit}")
    try:
        tree = storage.unflatten(codec(name).decode(data, layout.shapes(groups)))
    except StateError as error:
        raise CodecError(error.what) from error
    layout.check(tree, groups)
    return layout.ordered(tree)


def max_bytes(name: str, layout: Layout, groups: tuple[str, ...]) -> int:
    """Bytes of the largest payload of these groups."""
    return codec(name).max_bytes(layout.shapes(groups))


@dataclass(frozen=True)
class Sent:
    """An encoded update. decoded: what the receiver decodes. residual: what the sender adds to its next update, or
    None. error: own − decoded of a codec without feedback, for which the sender's state must be corrected; or None.
    left: norm of what the codec left out; None for a note. codec: the name of the codec that was used."""

    data: bytes
    decoded: Params
    residual: Params | None
    error: Params | None
    left: float | None = 0.0
    codec: str = ""


def send(
    name: str, own: Params, residual: Params | None, layout: Layout, groups: tuple[str, ...], seed: Seed = (0,),
    least_norm: float = 0.0,
) -> Sent:
    """Encodes an update. The residual of earlier updates is added first, whichever codec left it. If the norm is then
    below ``least_norm``, only a note is sent, and the whole update is the next residual, whatever the codec. The server
    counts zero, so the residual holds exactly what the server lacks, as with any codec that has feedback."""
    form = codec(name)
    intended = own if residual is None else trees.add(own, residual)
    if norm(intended) < least_norm:
        return withheld(intended)
    data = encode(name, intended, seed)
    if form.lossless:
        return Sent(data, intended, None, None, codec=name)
    decoded = decode(name, data, layout, groups)
    lost = trees.apply(lambda a, b: np.asarray(a - b, dtype=np.float32), intended, decoded)
    kept, error = (lost, None) if form.feedback else (None, lost)
    return Sent(data, decoded, kept, error, norm(lost), name)


def withheld(intended: Params) -> Sent:
    """A note in place of an update."""
    return Sent(encode(NOTHING.name, intended), trees.zeros_like(intended), intended, None, None, NOTHING.name)


def norm(params: Params) -> float:
    """Euclidean norm; infinite if a square is."""
    with np.errstate(over="ignore"):
        return float(trees.norm(params))


def relative(part: Params, whole: Params) -> float | None:
    """The norm of ``part`` over that of ``whole``; None if that is not finite."""
    above, below = norm(part), norm(whole)
    return above / below if below > 0 and math.isfinite(above) and math.isfinite(below) else None


def apply_delta(base: Params, delta: Params) -> dict[str, dict[str, Any]]:
    """base + delta in float32; arrays that the delta lacks stay. Aggregator and devices both compute it and must get
    the same bits."""
    return trees.merged(base, trees.apply(
        lambda d, b: np.asarray(np.asarray(b, dtype=np.float32) + np.asarray(d, dtype=np.float32)), delta, base
    ))


def identity(params: Params) -> str:
    """The id of decoded weights: the first 32 hex digits of the sha256 over names, shapes and float32 bytes."""
    digest = hashlib.sha256()
    for key, array in sorted(storage.flatten(params).items()):
        values = np.asarray(array, dtype="<f4", order="C")
        digest.update(f"{key}{values.shape}".encode())
        digest.update(values.reshape(-1).data)
    return digest.hexdigest()[:32]
