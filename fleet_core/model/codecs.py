"""Codecs for models and updates: named float32 arrays to bytes and back.

A payload is safetensors compressed by zstd. ``fp32`` is lossless; it stores all first bytes of the words, then all
second bytes, and so on, because only the exponents compress. ``int8`` stores one signed byte per value and one scale
per array (symmetric, round to nearest); with error feedback (Seide et al. 2014; Karimireddy et al. 2019) the sender
adds what an update lost to its next one. Rounding is deterministic, so that a run can be repeated bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base import storage, trees
from fleet_core.base.compression import compress, decompress
from fleet_core.base.errors import CodecError, StateError
from fleet_core.base.trees import Params
from fleet_core.model.layout import Layout

SCALE = "#scale"
HEADER_BYTES_PER_ARRAY = 512


@dataclass(frozen=True)
class Codec:
    """bits: per value. feedback: the sender keeps what was lost and adds it to its next payload."""

    name: str
    bits: int
    feedback: bool

    @property
    def lossy(self) -> bool:
        return self.bits < 32


CODECS = {c.name: c for c in (Codec("fp32", 32, False), Codec("int8", 8, True), Codec("int8-plain", 8, False))}


def codec(name: str) -> Codec:
    """Raises CodecError for a name that is not in ``CODECS``."""
    if name not in CODECS:
        raise CodecError(f"unknown codec '{name[:40]}'", expected="one of " + ", ".join(CODECS))
    return CODECS[name]


def encode(name: str, params: Params) -> bytes:
    """Encodes arrays of any float dtype. Raises CodecError for a value that is not finite in float32."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for key, array in storage.flatten(params).items():
        with np.errstate(over="ignore"):  # a value too large for float32 becomes infinite and is refused
            values = np.asarray(array, dtype=np.float32)
        if not np.isfinite(values).all():
            raise CodecError(f"array {key} holds a value that is not finite")
        if codec(name).bits == 8:
            scale = np.float32(np.abs(values).max(initial=0.0) / 127)
            quantized = np.rint(values / scale) if scale > 0 else np.zeros_like(values)
            tensors[key] = np.clip(quantized, -127, 127).astype(np.int8)
            tensors[key + SCALE] = scale.reshape(1)
        else:
            tensors[key] = values
    return payload(name, storage.pack(tensors))


def payload(name: str, packed: bytes) -> bytes:
    """Compresses safetensors bytes; for ``fp32`` the bytes of each word are separated first."""
    return compress(packed if codec(name).lossy else _planes(packed))


def decode(name: str, data: bytes, layout: Layout, groups: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Decodes a payload of ``encode`` to float32 arrays in the layout's order.

    The layout limits the decompressed size. Raises CodecError for bytes that are not such a payload, arrays other than
    the layout's, and values that are not finite.
    """
    form = codec(name)
    limit = layout.parameters(groups) * 4 + HEADER_BYTES_PER_ARRAY * (2 * len(layout.tensors) + 2)
    try:
        frame = decompress(data, limit)
        tensors, _ = storage.unpack(frame if form.lossy else _words(frame), where="payload")
    except StateError as error:
        raise CodecError(error.what) from error
    values = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
    for key in sorted(tensors.keys() - values.keys()):
        if form.bits == 32 or key.removesuffix(SCALE) not in values:
            raise CodecError(f"array {key[:80]} is a scale without its array")
    try:
        tree = storage.unflatten({k: _restore(form, k, v, tensors) for k, v in values.items()})
    except StateError as error:
        raise CodecError(error.what) from error
    layout.check(tree, groups)
    return layout.ordered(tree)


def _planes(words: bytes) -> memoryview:
    """All first bytes of the little-endian 32-bit words, then all second bytes, and so on."""
    array = np.frombuffer(words, dtype="<u4")
    places = np.empty((4, len(array)), dtype=np.uint8)
    for k, plane in enumerate(places):
        np.right_shift(array, np.uint32(8 * k), out=plane, casting="unsafe")
    return places.reshape(-1).data


def _words(planes: bytes) -> bytes:
    """The inverse of ``_planes``."""
    if len(planes) % 4:
        raise CodecError(f"{len(planes)} bytes are not a multiple of 4")
    places = np.frombuffer(planes, dtype=np.uint8).reshape(4, -1)
    words: np.ndarray[Any, Any] = places[3].astype("<u4")
    for plane in places[2::-1]:
        words <<= np.uint32(8)
        words |= plane
    return words.tobytes()


def _restore(form: Codec, key: str, values: np.ndarray[Any, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> Any:
    if form.bits == 32:
        if values.dtype != np.float32:
            raise CodecError(f"array {key[:80]} is {values.dtype}", expected="float32")
        return values
    scale = tensors.get(key + SCALE)
    if values.dtype != np.int8 or scale is None or scale.dtype != np.float32 or scale.shape != (1,):
        raise CodecError(f"array {key[:80]} is {values.dtype} without a float32 scale", expected="int8 and its scale")
    with np.errstate(over="ignore", invalid="ignore"):  # the layout's check finds a scale that is too large
        return np.asarray(values.astype(np.float32) * scale[0])


@dataclass(frozen=True)
class Sent:
    """An encoded update. decoded: what the receiver decodes. residual: what the sender adds to its next update, or
    None. error: own − decoded of a lossy codec without feedback, which is lost; or None."""

    data: bytes
    decoded: Params
    residual: Params | None
    error: Params | None


def send(name: str, own: Params, residual: Params | None, layout: Layout, groups: tuple[str, ...]) -> Sent:
    """Encodes an update. With error feedback the residual of earlier updates is added first."""
    form = codec(name)
    intended = trees.add(own, residual) if form.feedback and residual is not None else own
    data = encode(name, intended)
    if not form.lossy:
        return Sent(data, own, None, None)
    decoded = decode(name, data, layout, groups)
    lost = trees.apply(lambda a, b: np.asarray(a - b, dtype=np.float32), intended, decoded)
    return Sent(data, decoded, lost if form.feedback else None, None if form.feedback else lost)


def apply_delta(base: Params, delta: Params) -> dict[str, dict[str, Any]]:
    """base + delta in float32. Aggregator and devices both compute it and must get the same bits."""
    return trees.apply(
        lambda b, d: (np.asarray(b, dtype=np.float32) + np.asarray(d, dtype=np.float32)).astype(np.float32), base, delta
    )


def identity(params: Params) -> str:
    """The id of decoded weights: the first 32 hex digits of the sha256 over names, shapes and float32 bytes."""
    digest = hashlib.sha256()
    for key, array in sorted(storage.flatten(params).items()):
        values = np.asarray(array, dtype="<f4", order="C")
        digest.update(f"{key}{values.shape}".encode())
        digest.update(values.reshape(-1).data)
    return digest.hexdigest()[:32]
