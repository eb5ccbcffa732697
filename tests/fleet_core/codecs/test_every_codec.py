"""What holds of every codec: what it loses is bounded as it says, the same call gives the same bytes, error feedback
adds up, and bytes that are no payload are refused without taking memory."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fleet_core.base import compression, storage, trees
from fleet_core.base.errors import CodecError
from fleet_core.base.trees import Params
from fleet_core.codecs import frame, quantize, vector
from fleet_core.codecs.interface import Arrays
from fleet_core.codecs.kinds import top_k
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model import payloads
from fleet_core.model.layout import InputSpec, Layout, TensorSpec

GROUPS = ("body", "head")
LAYOUT = Layout(
    model="mlp", input=InputSpec(shape=(3,)), classes=("a", "b"), embedding=4,
    tensors=(
        TensorSpec("kernel", "body", (12, 3, 4)), TensorSpec("one", "body", ()), TensorSpec("bias", "body", (7,)),
        TensorSpec("nothing", "body", (0, 4)), TensorSpec("w", "head", (2, 3)), TensorSpec("single", "head", (1,)),
    ),
)
SHAPES = LAYOUT.shapes(GROUPS)
SEED = (5, 3, 0xDEADBEEF)
FRAMED = [name for name, codec in CODECS.items() if isinstance(codec, frame.FramedCodec)]
TOPK = [name for name in CODECS if name.startswith("topk")]
FEEDBACK = [name for name, codec in CODECS.items() if codec.feedback]
UNBIASED = [name for name, codec in CODECS.items() if codec.unbiased and not codec.lossless]
KEY, WORDS = 5907621691000825550, [11208242713459863706, 9703051172814427650, 9876818554087966502]
TINY = 2.0**-133  # the smallest subnormal bfloat16

every = pytest.mark.parametrize("name", CODECS)
framed = pytest.mark.parametrize("name", FRAMED)
VALUES = st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=True)
MODELS = st.fixed_dictionaries({k: arrays.arrays(np.float32, shape, elements=VALUES) for k, shape in SHAPES.items()})


def noise(seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape) * scale, np.float32) for name, shape in SHAPES.items()}


def constant(value: float) -> dict[str, Any]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def lost(name: str, flat: Arrays) -> float:
    decoded = CODECS[name].decode(CODECS[name].encode(flat, SEED), SHAPES)
    assert {k: (v.dtype, v.shape) for k, v in decoded.items()} == {k: (np.float32, s) for k, s in SHAPES.items()}
    missing = [flat[key].astype(np.float64) - decoded[key].astype(np.float64) for key in flat]
    return float(np.sqrt(sum(float((part**2).sum()) for part in missing)))


def within(name: str, flat: Arrays) -> None:
    allowed = CODECS[name].bound(flat) * (1 + 1e-5) + TINY * vector.size(SHAPES)
    assert lost(name, flat) <= allowed


# What is lost ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every
@settings(deadline=None, max_examples=40)
@given(flat=MODELS)
def test_a_codec_loses_no_more_than_it_says(name: str, flat: dict[str, Any]) -> None:
    within(name, flat)


@every
@pytest.mark.parametrize("scale", [1e-43, 1e-38, 1e-6, 1.0, 1e30])
def test_the_bound_holds_for_noise_of_any_size(name: str, scale: float) -> None:
    within(name, noise(scale=scale))


@every
def test_zeros_stay_zeros(name: str) -> None:
    assert lost(name, constant(0.0)) == 0.0


@every
@pytest.mark.parametrize("value", [1e-45, -0.3, 3.0, 1e37])
def test_constant_arrays_are_within_the_bound(name: str, value: float) -> None:
    within(name, constant(value))


@pytest.mark.parametrize("name", [n for n in CODECS if n not in (*TOPK, "mask")])
def test_a_value_alone_in_its_array_keeps_two_digits(name: str) -> None:
    flat = {**constant(0.0), "head/single": np.array([0.7351], np.float32)}
    assert lost(name, flat) < 0.01


@pytest.mark.parametrize("name", TOPK)
def test_the_largest_values_arrive(name: str) -> None:
    flat = noise(scale=1e-3)
    flat["body/kernel"][3, 1, 2] = -5.0
    decoded = CODECS[name].decode(CODECS[name].encode(flat, SEED), SHAPES)
    assert decoded["body/kernel"][3, 1, 2] == pytest.approx(-5.0, rel=0.01)


def test_of_equal_values_topk_sends_the_first() -> None:
    values = np.array([1, -2, 1, 0, 2, -1, 1, 1, 0, 1], np.float32)
    assert top_k._largest_places(values, 4).tolist() == [0, 1, 2, 4]
    assert top_k._largest_places(values, 2).tolist() == [1, 4]


@pytest.mark.parametrize(("eight", "four"), [("topk-10", "topk-10-4bit"), ("topk-1", "topk-1-4bit")])
def test_four_bits_are_shorter_and_no_value_that_is_sent_becomes_zero(eight: str, four: str) -> None:
    rng = np.random.default_rng(0)
    flat, shapes = {"a": np.asarray(rng.standard_t(3, 20_000), np.float32)}, {"a": (20_000,)}
    sent = {name: CODECS[name].encode(flat, SEED) for name in (eight, four)}
    assert len(sent[four]) < 0.8 * len(sent[eight])
    values = {name: CODECS[name].decode(sent[name], shapes)["a"] for name in sent}
    places = np.flatnonzero(values[four])
    assert len(places) == np.flatnonzero(values[eight]).size
    assert (np.sign(values[four][places]) == np.sign(flat["a"][places])).all()


def test_a_half_byte_after_an_odd_number_of_codes_is_refused() -> None:
    pairs = np.frombuffer(quantize.nibbles(np.array([5, 15, 8], np.uint8)), np.uint8)
    assert quantize.from_nibbles(pairs, 3).tolist() == [5, 15, 8]
    with pytest.raises(CodecError, match="a code too many"):
        quantize.from_nibbles(np.array([0, 16], np.uint8), 3)


def test_a_matrix_of_rank_two_arrives_to_bfloat16() -> None:
    rng = np.random.default_rng(0)
    flat = {**constant(0.0), "body/kernel": np.asarray(rng.normal(size=(12, 2)) @ rng.normal(size=(2, 12)), np.float32)}
    flat["body/kernel"] = flat["body/kernel"].reshape(12, 3, 4)
    assert lost("lowrank", flat) < 0.01 * vector.length(flat)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_over_seeds_is_what_was_encoded(name: str) -> None:
    """The error of a mean of 4000 is below five standard errors, at every place."""
    flat, codec = noise(), CODECS[name]
    draws = np.stack([
        vector.joined(codec.decode(codec.encode(flat, (seed, 1, 2)), SHAPES)).astype(np.float64) for seed in range(4000)
    ])
    error = draws.mean(0) - vector.joined(flat)
    assert (np.abs(error) < 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-6).all()
    assert draws.std(0).max() > 1e-4


@pytest.mark.parametrize("name", FEEDBACK)
def test_with_feedback_all_that_was_meant_arrives_or_is_kept(name: str) -> None:
    """Σ decoded + the last residual = Σ own, to float32."""
    residual: Params | None = None
    meant = arrived = trees.zeros_like(storage.unflatten(noise()))
    for seed in range(20):
        own = storage.unflatten(noise(seed))
        sent = payloads.send(name, own, residual, LAYOUT, GROUPS, (seed,))
        meant, arrived, residual = trees.add(meant, own), trees.add(arrived, sent.decoded), sent.residual
        assert sent.error is None
    assert residual is not None
    assert trees.norm(trees.subtract(trees.subtract(meant, arrived), residual)) < 1e-4


@pytest.mark.parametrize("name", [n for n, c in CODECS.items() if not c.feedback and not c.lossless])
def test_without_feedback_the_error_is_said_and_no_residual_kept(name: str) -> None:
    own, residual = storage.unflatten(noise()), storage.unflatten(noise(1))
    sent = payloads.send(name, own, residual, LAYOUT, GROUPS, SEED)
    assert (sent.residual, sent.error is None) == (None, False)
    assert sent.error is not None
    assert trees.norm(trees.subtract(trees.add(own, residual), trees.add(sent.decoded, sent.error))) < 1e-4


# The same bytes -------------------------------------------------------------------------------------------------------


@every
def test_the_same_call_gives_the_same_bytes_in_any_order_of_the_arrays(name: str) -> None:
    flat, codec = noise(), CODECS[name]
    turned = dict(reversed(list(flat.items())))
    assert codec.encode(flat, SEED) == codec.encode(noise(), SEED)
    assert equal(codec.decode(codec.encode(turned, SEED), SHAPES), codec.decode(codec.encode(flat, SEED), SHAPES))


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("other", [(6, 3, 0xDEADBEEF), (5, 4, 0xDEADBEEF), (5, 3, 0)], ids=["fleet", "round", "device"])
def test_a_codec_that_draws_draws_anew_for_another_fleet_round_or_device(name: str, other: tuple[int, ...]) -> None:
    assert CODECS[name].encode(noise(), SEED) != CODECS[name].encode(noise(), other)


def test_the_random_numbers_are_those_of_every_version_of_numpy() -> None:
    """Both sides of ``mask`` compute them; these were written down with numpy 2."""
    assert quantize.key(SEED) == KEY
    assert quantize.random_words(KEY, 3).tolist() == WORDS


def equal(left: Arrays, right: Arrays) -> bool:
    return {k: v.tobytes() for k, v in left.items()} == {k: v.tobytes() for k, v in right.items()}


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every
@settings(deadline=None, max_examples=30)
@given(flat=MODELS)
def test_no_payload_is_larger_than_the_codec_says(name: str, flat: dict[str, Any]) -> None:
    assert len(CODECS[name].encode(flat, SEED)) <= CODECS[name].max_bytes(SHAPES)


@every
def test_nothing_is_a_payload_too(name: str) -> None:
    assert CODECS[name].decode(CODECS[name].encode({}, SEED), {}) == {}


@framed
def test_a_body_has_exactly_the_bytes_that_the_shapes_ask_for(name: str) -> None:
    codec = CODECS[name]
    body = frame.unpack(codec.encode(noise(), SEED), codec.max_bytes(SHAPES))
    for wrong in (body[:-1], body + b"\1"):
        with pytest.raises(CodecError):
            codec.decode(frame.pack(wrong), SHAPES)
    other = {**SHAPES, "body/bias": (11,)}
    with pytest.raises(CodecError):
        codec.decode(codec.encode(noise(), SEED), {**other, "body/kernel": (40, 3, 4)})


@settings(deadline=None)
@given(st.data())
def test_the_places_of_the_largest_values_are_coded_without_loss(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 3000))
    places = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=40))), np.int64)
    coded = top_k.rice_encode(places, count)
    assert len(coded) <= top_k.rice_max_bytes(len(places), count)
    assert top_k.rice_decode(frame.Reader(coded), len(places), count).tolist() == places.tolist()


# What is refused ------------------------------------------------------------------------------------------------------


@every
def test_a_payload_cut_short_anywhere_or_followed_by_more_is_refused(name: str) -> None:
    data = payloads.encode(name, storage.unflatten(noise()), SEED)
    for end in range(len(data)):
        with pytest.raises(CodecError):
            payloads.decode(name, data[:end], LAYOUT, GROUPS)
    for more in (data + b"\0", data + data):
        with pytest.raises(CodecError):
            payloads.decode(name, more, LAYOUT, GROUPS)


@every
def test_a_flipped_bit_is_found_unless_zstd_ignores_it(name: str) -> None:
    data = payloads.encode(name, storage.unflatten(noise()), SEED)
    sound, unnoticed = payloads.decode(name, data, LAYOUT, GROUPS), 0
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        try:
            decoded = payloads.decode(name, bytes(flipped), LAYOUT, GROUPS)
        except CodecError:
            continue
        unnoticed += 1
        assert equal(storage.flatten(decoded), storage.flatten(sound))
    assert unnoticed <= 8


@every
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=300), kind=st.sampled_from([b"", frame.STORED, frame.COMPRESSED]))
def test_arbitrary_bytes_are_refused(name: str, data: bytes, kind: bytes) -> None:
    with pytest.raises(CodecError):
        payloads.decode(name, kind + data, LAYOUT, GROUPS)


@pytest.mark.slow
@framed
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=800))
def test_a_sound_frame_with_any_body_is_refused_or_is_a_model_of_the_layout(name: str, data: bytes) -> None:
    size = len(frame.unpack(CODECS[name].encode(noise(), SEED), 1 << 20))
    for body in (data, data[:size].ljust(size, b"\x11")):
        try:
            decoded = payloads.decode(name, frame.pack(body), LAYOUT, GROUPS)
        except CodecError:
            continue
        LAYOUT.check(decoded, GROUPS)


@framed
def test_a_body_larger_than_the_layout_allows_is_refused_before_it_takes_memory(name: str) -> None:
    bomb = frame.COMPRESSED + compression.compress(bytes(200 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            payloads.decode(name, bomb, LAYOUT, GROUPS)
        with pytest.raises(CodecError):
            CODECS[name].decode(bomb, SHAPES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("name", ["fp16", "int8-random", "ternary", "topk-10", "topk-10-4bit"])
def test_a_scale_that_is_none_is_refused(name: str, scale: float) -> None:
    body = frame.unpack(CODECS[name].encode(noise(), SEED), 1 << 20)
    with pytest.raises(CodecError, match="a scale that is negative or not finite"):
        payloads.decode(name, frame.pack(struct.pack("<f", scale) + body[4:]), LAYOUT, GROUPS)


@pytest.mark.parametrize("name", ["int8-channel", "int4"])
def test_a_channels_scale_that_is_none_is_refused(name: str) -> None:
    body = frame.unpack(CODECS[name].encode(noise(), SEED), 1 << 20)
    with pytest.raises(CodecError, match="a scale that is negative or not finite"):
        payloads.decode(name, frame.pack(b"\x80\x7f" + body[2:]), LAYOUT, GROUPS)


@pytest.mark.parametrize("name", ["fp16", "int8-random", "topk-10", "mask"])
def test_a_scale_that_makes_values_infinite_is_refused(name: str) -> None:
    flat = constant(1.0)
    body, at = frame.unpack(CODECS[name].encode(flat, SEED), 1 << 20), 8 if name == "mask" else 0
    with pytest.raises(CodecError, match="not finite"):
        payloads.decode(name, frame.pack(body[:at] + struct.pack("<f", 3e38) + body[at + 4 :]), LAYOUT, GROUPS)


@pytest.mark.parametrize(
    ("name", "last", "message"),
    [("ternary", b"\xff", "not five ternary digits"), ("int4", b"\x00", "a code that is none of"),
     ("topk-10", b"\xff", r"has \d+ places; expected 16"),
     ("topk-10-4bit", b"\xff", r"has \d+ places; expected 16")],
)
def test_codes_that_there_are_not_are_refused(name: str, last: bytes, message: str) -> None:
    body = frame.unpack(CODECS[name].encode(noise(), SEED), 1 << 20)
    with pytest.raises(CodecError, match=message):
        payloads.decode(name, frame.pack(body[:-1] + last), LAYOUT, GROUPS)


def test_a_place_beyond_the_last_value_is_refused() -> None:
    with pytest.raises(CodecError, match="a value at place 29 of 20"):
        top_k.rice_decode(frame.Reader(top_k.rice_encode(np.array([29]), 20)), 1, 20)
