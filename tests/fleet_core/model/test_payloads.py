"""Payloads: what is encoded is decoded, losses are bounded and accounted for, and malformed payloads are refused."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fleet_core.base import compression, storage, trees
from fleet_core.base.errors import CodecError
from fleet_core.base.trees import Params
from fleet_core.codecs import safetensors_payload
from fleet_core.codecs.kinds import registry
from fleet_core.codecs.kinds.int8 import SCALE
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model import payloads
from fleet_core.model.layout import InputSpec, Layout, TensorSpec

GROUPS = ("body", "head")
OLDER = ("fp32", "int8", "int8-plain")  # their payloads are safetensors
LAYOUT = Layout(
    model="mlp",
    input=InputSpec(shape=(3,)),
    classes=("a", "b"),
    embedding=4,
    tensors=(
        TensorSpec("w", "body", (4, 3)),
        TensorSpec("b", "body", (4,)),
        TensorSpec("w", "head", (2, 4)),
        TensorSpec("temperature", "head", ()),
        TensorSpec("count", "buffers", (1,)),
    ),
)
SHAPES = {f"{t.group}/{t.name}": t.shape for t in LAYOUT.tensors if t.group in GROUPS}
LARGE = 2.0**120

FINITE = st.floats(-LARGE, LARGE, width=32, allow_subnormal=False)
MODELS = st.fixed_dictionaries({k: arrays.arrays(np.float32, shape, elements=FINITE) for k, shape in SHAPES.items()})


def model(seed: int = 0, dtype: Any = np.float32) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return storage.unflatten({key: np.asarray(rng.normal(size=shape), dtype) for key, shape in SHAPES.items()})


def payload(name: str, tensors: Mapping[str, Any]) -> bytes:
    """A payload of any arrays."""
    packed = storage.pack(tensors)
    return framed(name, packed + bytes(-len(packed) % 4 if name == "fp32" else 0))


def framed(name: str, packed: bytes) -> bytes:
    return safetensors_payload.payload(packed, words=name == "fp32")


def quantized() -> dict[str, Any]:
    """The arrays of a valid int8 payload."""
    ones = {key: np.ones(shape, np.int8) for key, shape in SHAPES.items()}
    return ones | {key + SCALE: np.ones(1, np.float32) for key in SHAPES}


def equal(left: Params, right: Params) -> bool:
    flat = [storage.flatten(tree) for tree in (left, right)]
    return [(k, v.dtype, v.tobytes()) for k, v in flat[0].items()] == [
        (k, v.dtype, v.tobytes()) for k, v in flat[1].items()
    ]


# Round trips --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(MODELS)
def test_fp32_keeps_every_bit(flat: dict[str, Any]) -> None:
    params = LAYOUT.ordered(storage.unflatten(flat))
    assert equal(payloads.decode("fp32", payloads.encode("fp32", params), LAYOUT, GROUPS), params)


@pytest.mark.parametrize("name", ["int8", "int8-plain"])
@settings(deadline=None)
@given(flat=MODELS)
def test_int8_is_within_half_a_step_of_every_value(name: str, flat: dict[str, Any]) -> None:
    params = storage.unflatten(flat)
    decoded = payloads.decode(name, payloads.encode(name, params), LAYOUT, GROUPS)
    for key, restored in storage.flatten(decoded).items():
        assert restored.dtype == np.float32
        step = float(np.abs(flat[key]).max()) / 127
        lost = np.abs(restored.astype(np.float64) - flat[key].astype(np.float64))
        assert lost.max() <= 0.5001 * step + 1e-37


def test_int8_reaches_both_ends_of_its_range_and_rounds_to_the_nearest() -> None:
    params = model()
    params["body"]["b"] = np.array([127.0, -127.0, 0.6, -0.4], np.float32)
    decoded = payloads.decode("int8", payloads.encode("int8", params), LAYOUT, GROUPS)
    assert decoded["body"]["b"].tolist() == [127.0, -127.0, 1.0, 0.0]


def test_an_array_of_zeros_stays_one() -> None:
    params = trees.zeros_like(model())
    assert equal(payloads.decode("int8", payloads.encode("int8", params), LAYOUT, GROUPS), params)


@pytest.mark.parametrize("name", CODECS)
def test_equal_values_give_equal_bytes_of_any_float_type_and_decode_in_the_layouts_order(name: str) -> None:
    params = model()
    turned = {g: dict(reversed(list(named.items()))) for g, named in reversed(list(params.items()))}
    wide = trees.apply(lambda a: a.astype(np.float64), params)
    assert payloads.encode(name, params) == payloads.encode(name, wide)
    decoded = payloads.decode(name, payloads.encode(name, turned), LAYOUT, GROUPS)
    assert list(storage.flatten(decoded)) == list(SHAPES)
    assert equal(decoded, payloads.decode(name, payloads.encode(name, params), LAYOUT, GROUPS))


def test_one_group_alone_travels_alone() -> None:
    body = {"body": model()["body"]}
    assert equal(payloads.decode("fp32", payloads.encode("fp32", body), LAYOUT, ("body",)), body)


def test_int8_is_a_quarter_of_fp32_and_little_more() -> None:
    values = {"body": {"w": np.random.default_rng(0).normal(size=(300, 400)).astype(np.float32)}}
    full, small = len(payloads.encode("fp32", values)), len(payloads.encode("int8", values))
    assert 120_000 * 4 * 0.8 < full < 120_000 * 4 * 0.9  # the exponents of noise alike compress
    assert small < 120_000 + 1000


# The wire format of the versions before -----------------------------------------------------------------------------

RECORDED = {
    "fp32": bytes.fromhex(
        "28b52ffd646c0035080026d0362980b5cd0133380f30c804668ee01aa1a861ff9ea47fdbb9669348c8507808513462bb0f2d8aaf808e292c"
        "002a002a00676c62cff4df470aa162c26b38060ab9346ea840856ad45ebd5322165d68e835da2120076a6fb643a54d1d7ff131da98edbf1e"
        "250e3bb35b2bba173d50a3f6ea9d92c1a8b3b9252113eccc3ec09f89b1e9f91f3631162b3b49722b3fd6d7232f879010822389a171439737"
        "dba1d2aed3d25e941bb5c60dfd9f6d8c36ff39da180c0321455515641808e1298aaaaa2aa0e01d918db6c1616736b41828a46bdcd0026dca"
        "ab77cac4fd2597570f005305105999d7cc1e64ceaea3de906dcdcc74e5469e5060cd29706fd76c7a423953dddaca26195fed8f69"
    ),
    "int8": bytes.fromhex(
        "28b52ffd6439016d0700628c2e30704bd301b0fe08081120f0820b804d13227cf46e554b745b56abef75bd38fa13bfedc46cb93ba09a4186"
        "23f9391d111299040974645454328806858381854303c382a2925d2c0b02d33810a671201b0600094ce31060d8d4de32bf75cceb98f771bc"
        "94c72dd49e04df3356f4fb88e1f03dad2a7fc153505bd75cdba82713354e7a4a747dc8d8d5179ba27d94c5a6b78f044f6bd34844e2106b94"
        "dfa949f03d6345bf77bc70f89e5695bfe03b223ed002ea614909f56b6902021200e00dc158009a1ee185120b10d6809e6d04081e02cbbc6a"
        "ef84f5186ac5c761c73aa19168c2d98073c110f0b4c00d9b5bdd6b"
    ),
}
RECORDED["int8-plain"] = RECORDED["int8"]


def recorded_model() -> dict[str, dict[str, Any]]:
    return {
        "body": {
            "w": (np.arange(-6, 6, dtype=np.float32) / 7).reshape(4, 3), "b": np.array([0, 1e-3, -2.5, 4], np.float32),
        },
        "head": {
            "w": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), "temperature": np.array(0.25, np.float32),
        },
    }


@pytest.mark.parametrize("name", RECORDED)
def test_bytes_of_the_version_before_are_read_and_written_as_they_were(name: str) -> None:
    """Compared before compression, because another version of zstd may compress differently."""
    data = payloads.encode(name, recorded_model())
    assert compression.decompress(data, 1 << 16) == compression.decompress(RECORDED[name], 1 << 16)
    restored = payloads.decode(name, RECORDED[name], LAYOUT, GROUPS)
    assert equal(restored, payloads.decode(name, data, LAYOUT, GROUPS))
    if name == "fp32":
        assert equal(restored, recorded_model())


# What is lost -------------------------------------------------------------------------------------------------------


def test_with_feedback_everything_that_was_meant_arrives_in_the_end() -> None:
    """Σ decoded + the last residual = Σ own, to float32."""
    residual: Params | None = None
    meant, arrived = trees.zeros_like(model()), trees.zeros_like(model())
    for seed in range(20):
        sent = payloads.send("int8", model(seed), residual, LAYOUT, GROUPS)
        meant, arrived, residual = trees.add(meant, model(seed)), trees.add(arrived, sent.decoded), sent.residual
        assert sent.error is None
        assert equal(sent.decoded, payloads.decode("int8", sent.data, LAYOUT, GROUPS))
    assert residual is not None
    missing = trees.subtract(meant, arrived)
    assert trees.norm(missing) > 1e-3
    assert trees.norm(trees.subtract(missing, residual)) < 1e-5


def test_without_feedback_the_error_is_reported_and_an_earlier_residual_is_sent() -> None:
    own, other = model(), model(1)
    sent = payloads.send("int8-plain", own, other, LAYOUT, GROUPS)
    assert sent.residual is None
    assert sent.error is not None
    assert trees.norm(sent.error) > 1e-3
    assert trees.norm(trees.subtract(trees.add(own, other), trees.add(sent.decoded, sent.error))) < 1e-6


def test_fp32_loses_nothing_and_keeps_nothing() -> None:
    sent = payloads.send("fp32", model(), None, LAYOUT, GROUPS)
    assert (sent.residual, sent.error, sent.left) == (None, None, 0.0)
    assert equal(sent.decoded, model())


@pytest.mark.parametrize("name", ["fp32", "int8-random"])
def test_what_a_codec_with_feedback_left_out_goes_with_the_next_update_whatever_its_codec(name: str) -> None:
    own = model(1)
    left = payloads.send("topk-10", model(), None, LAYOUT, GROUPS).residual
    sent = payloads.send(name, own, left, LAYOUT, GROUPS)
    assert left is not None
    assert equal(sent.decoded, payloads.decode(name, sent.data, LAYOUT, GROUPS))
    assert trees.norm(trees.subtract(trees.add(own, left), sent.decoded)) < 0.02 * trees.norm(own)
    assert sent.residual is None


@pytest.mark.parametrize("name", ["int4", "int8-random"])
def test_the_norm_of_what_was_left_out_is_said_with_and_without_feedback(name: str) -> None:
    sent = payloads.send(name, model(), model(1), LAYOUT, GROUPS)
    missing = trees.subtract(trees.add(model(), model(1)), sent.decoded)
    assert sent.left == pytest.approx(trees.norm(missing))
    assert payloads.send(name, trees.zeros_like(model()), None, LAYOUT, GROUPS).left == 0


def test_a_relative_norm_is_none_where_it_is_no_number() -> None:
    zeros = trees.zeros_like(model())
    assert payloads.relative(model(), model()) == 1
    assert payloads.relative(model(), zeros) is None
    assert payloads.relative(trees.scale(model(), np.float32(1e30)), model()) is None


# A model as a delta, and its identity -------------------------------------------------------------------------------


def test_server_and_device_move_to_the_same_bits() -> None:
    """The server holds arrays that it decoded, the device arrays that it read from its disk in the file's order."""
    server: Params = payloads.decode("fp32", payloads.encode("fp32", model()), LAYOUT, GROUPS)
    device = server
    for seed in range(1, 30):
        data = payloads.encode("int8", trees.scale(model(seed, np.float64), 1e-3))
        server = payloads.apply_delta(server, payloads.decode("int8", data, LAYOUT, GROUPS))
        stored, _ = storage.unpack(storage.pack(dict(sorted(storage.flatten(device).items(), reverse=True))))
        device = payloads.apply_delta(storage.unflatten(stored), payloads.decode("int8", data, LAYOUT, GROUPS))
        assert payloads.identity(server) == payloads.identity(device)
    assert equal(server, LAYOUT.ordered(device))
    assert not equal(server, model())


def test_a_move_is_one_sum_in_float32_whatever_the_delta_came_as() -> None:
    base, delta = model(), model(1)
    moved = payloads.apply_delta(base, trees.apply(lambda a: a.astype(np.float64), delta))
    assert equal(moved, trees.add(base, delta))


def test_the_identity_knows_no_order_and_no_width_and_every_name_shape_and_bit() -> None:
    params = model()
    known = payloads.identity(params)
    turned = {g: dict(reversed(list(named.items()))) for g, named in reversed(list(params.items()))}
    wide, transposed = (trees.apply(f, params) for f in (np.float64, lambda a: np.asarray(a, order="F")))
    same = [turned, wide, transposed]
    assert {payloads.identity(other) for other in same} == {known}
    bit = trees.apply(lambda a: a.copy(), params)
    bit["body"]["b"][0] = np.nextafter(bit["body"]["b"][0], np.float32(9))
    renamed = {"body": {"v" if name == "w" else name: a for name, a in params["body"].items()}, "head": params["head"]}
    reshaped = {**params, "head": {**params["head"], "w": params["head"]["w"].T.reshape(4, 2)}}
    others = [bit, renamed, reshaped, {"body": params["body"]}]
    assert len({known, *map(payloads.identity, others)}) == 5


def test_the_identity_is_the_one_that_older_devices_hold() -> None:
    fixed = {"body": {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, "head": {"b": np.array([0.5], np.float32)}}
    assert payloads.identity(fixed) == "972ba0f13e1e2ce68fcffcd2e31ee621"


# What is refused ----------------------------------------------------------------------------------------------------


def test_an_unknown_codec_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(CodecError, match=r"unknown codec 'int9' \(did you mean 'int8'\?\)") as caught:
        registry.codec("int9")
    assert caught.value.expected == "one of " + ", ".join(CODECS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("name", CODECS)
def test_a_value_that_is_not_finite_as_float32_is_not_sent(name: str, value: float) -> None:
    params = model(dtype=np.float64)
    params["body"]["b"][2] = value
    with pytest.raises(CodecError, match="array body/b holds a value that is not finite"):
        payloads.encode(name, params)


def fp32(**changed: Any) -> dict[str, Any]:
    """The arrays of a valid fp32 payload, some changed or (None) left out; ``body_b`` is body/b."""
    return _changed(storage.flatten(model()), changed)


def int8(**changed: Any) -> dict[str, Any]:
    return _changed(quantized(), changed)


def _changed(tensors: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**tensors, **{key.replace("_scale", SCALE).replace("_", "/"): value for key, value in changed.items()}}
    return {key: value for key, value in merged.items() if value is not None}


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "nan": ("fp32", fp32(body_b=np.full(4, np.nan, np.float32)), "body/b holds a value that is not finite"),
    "infinite": ("fp32", fp32(head_w=np.full((2, 4), np.inf, np.float32)), "head/w holds a value that is not finite"),
    "an array too few": ("fp32", fp32(body_b=None), "array body/b has shape none"),
    "an array too many": ("fp32", fp32(body_x=np.ones(3, np.float32)), "array body/x has shape"),
    "a group too many": ("fp32", fp32(buffers_count=np.ones(1, np.float32)), "array buffers/count has shape"),
    "no group": ("fp32", fp32(lonely=np.ones(3, np.float32)), "array 'lonely' has no group in its name"),
    "nothing": ("fp32", {}, "has shape none"),
    "another shape": ("fp32", fp32(body_b=np.ones(5, np.float32)), r"body/b has shape \(5,\)"),
    "another shape of that size": ("fp32", fp32(body_w=np.ones((3, 4), np.float32)), r"body/w has shape \(3, 4\)"),
    "float64": ("fp32", fp32(body_b=np.ones(4)), "body/b is float64"),
    "float16": ("fp32", fp32(body_b=np.ones(4, np.float16)), "body/b is float16"),
    "bool": ("fp32", fp32(body_b=np.ones(4, bool)), "body/b is bool"),
    "int8 as fp32": ("fp32", quantized(), "not safetensors"),
    "a scale in fp32": ("fp32", fp32(body_b_scale=np.ones(1, np.float32)), "body/b#scale is a scale without its array"),
    "fp32 as int8": ("int8", fp32(), "is float32 without a float32 scale"),
    "uint8": ("int8", int8(body_b=np.ones(4, np.uint8)), "body/b is uint8"),
    "no scale": ("int8", int8(body_b_scale=None), "body/b is int8 without a float32 scale"),
    "two scales": ("int8", int8(body_b_scale=np.ones(2, np.float32)), "body/b is int8 without"),
    "a float64 scale": ("int8", int8(body_b_scale=np.ones(1)), "body/b is int8 without"),
    "a scale of nothing": ("int8", int8(x_y_scale=np.ones(1, np.float32)), "x/y#scale is a scale without its array"),
    "a scale of nan": ("int8", int8(body_b_scale=np.full(1, np.nan, np.float32)), "body/b holds a value that is not"),
    "an infinite scale": ("int8", int8(body_b_scale=np.full(1, np.inf, np.float32)), "body/b holds a value that is"),
    "a scale too large": (
        "int8",
        int8(body_b_scale=np.full(1, 3e38, np.float32), body_b=np.full(4, 100, np.int8)),
        "body/b holds a value that is not finite",
    ),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", BAD)
def test_arrays_that_are_not_the_layouts_are_refused(case: str) -> None:
    name, tensors, message = BAD[case]
    with pytest.raises(CodecError, match=message):
        payloads.decode(name, payload(name, tensors), LAYOUT, GROUPS)


def test_the_sound_payloads_that_those_were_made_of_are_taken() -> None:
    for name, tensors in (("fp32", fp32()), ("int8", int8())):
        payloads.decode(name, payload(name, tensors), LAYOUT, GROUPS)


def header(text: str, body: bytes = b"") -> bytes:
    """A safetensors file with this header, padded to whole words."""
    padded = text.encode().ljust(-(-len(text) // 4) * 4)
    return struct.pack("<Q", len(padded)) + padded + body


def described(dtype: str, shape: list[int], size: int) -> str:
    return json.dumps({"body/w": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}})


FRAMED = {
    "no header": b"1234",
    "a header longer than the rest": struct.pack("<Q", 1 << 62) + b"{}  ",
    "no JSON": header("{"),
    "no object": header("[]"),
    "deep JSON": header("[" * 2000),
    "an array past the end": header(described("F32", [4, 3], 48), bytes(8)),
    "a shape past its bytes": header(described("F32", [1 << 31, 1 << 31], 8), bytes(8)),
    "a shape of 0 by 2⁶⁰": header(described("F32", [0, 1 << 60], 0)),
    "bfloat16": header(described("BF16", [4, 3], 24), bytes(24)),
    "metadata of another kind": header('{"__metadata__": [1]}'),
}
HOSTILE = {
    "nothing": b"",
    "no frame": b"safetensors without zstd around it",
    "an empty frame": compression.compress(b""),
    "half a word": compression.compress(b"123"),
}


@pytest.mark.parametrize("case", [*HOSTILE, *FRAMED])
@pytest.mark.parametrize("name", OLDER)
def test_bytes_that_are_no_payload_are_refused(name: str, case: str) -> None:
    with pytest.raises(CodecError):
        payloads.decode(name, HOSTILE[case] if case in HOSTILE else framed(name, FRAMED[case]), LAYOUT, GROUPS)


def test_a_payload_cut_short_anywhere_or_followed_by_more_is_refused() -> None:
    data = payloads.encode("int8", model())
    for end in range(len(data)):
        with pytest.raises(CodecError):
            payloads.decode("int8", data[:end], LAYOUT, GROUPS)
    with pytest.raises(CodecError, match="truncated or followed by other bytes"):
        payloads.decode("int8", data + data, LAYOUT, GROUPS)


def test_a_zstd_bomb_is_refused_before_it_takes_memory() -> None:
    bomb = compression.compress(bytes(200 << 20))
    assert len(bomb) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=r"not a zstd frame of at most \d+ bytes: .* too much memory"):
            safetensors_payload.unpack(bomb, SHAPES, words=True)
        with pytest.raises(CodecError, match=r"a payload of \d+ bytes; expected at most"):
            payloads.decode("fp32", bomb, LAYOUT, GROUPS)
        with pytest.raises(CodecError, match="more than its limit"):
            compression.decompress(compression.compress(bytes(1001)), 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300), name=st.sampled_from(OLDER), whole=st.booleans())
def test_arbitrary_bytes_are_refused_and_nothing_else_happens(data: bytes, name: str, whole: bool) -> None:
    with pytest.raises(CodecError):
        payloads.decode(name, framed(name, data + bytes(-len(data) % 4)) if whole else data, LAYOUT, GROUPS)


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(1, 255), name=st.sampled_from(["fp32", "int8"]))
def test_a_damaged_payload_is_refused_or_is_a_model_of_the_layout(place: int, value: int, name: str) -> None:
    whole = bytearray(storage.pack(fp32() if name == "fp32" else int8()))
    whole[place % len(whole)] ^= value
    try:
        decoded = payloads.decode(name, framed(name, bytes(whole)), LAYOUT, GROUPS)
    except CodecError:
        return
    LAYOUT.check(decoded, GROUPS)
