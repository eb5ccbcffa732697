"""Bytes from outside give a message or a MessageError: no other exception, no unbounded memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import string
import tomllib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.base import compression, config, schema, storage
from fleet_core.base.errors import ConfigError, MessageError, StateError
from fleet_core.protocol import chunks, cohort, messages, topics
from fleet_core.protocol.chunks import Blob, Inbox, cut
from fleet_core.protocol.device_messages import (
    Answer,
    Down,
    Energy,
    EnrolAnswer,
    EnrolRequest,
    Evaluation,
    Presence,
    Question,
    Report,
    ServerPresence,
    Traffic,
)
from fleet_core.protocol.round_messages import (
    Cohort,
    Cost,
    Counted,
    Manifest,
    MethodRef,
    ModelRef,
    UpdateRef,
    UploadManifest,
    UploadRules,
    whole_update,
    with_its_bytes,
)
from fleet_core.protocol.signing import Signer, Verifier, load_public

KINDS = (Manifest, UploadManifest, Presence, Report, Down, ServerPresence, Question, Answer, EnrolRequest, EnrolAnswer)

names = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=64)
codecs = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=32)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(-1e9, 1e9)
ids = st.text("0123456789abcdef", min_size=32, max_size=32)
blobs = st.builds(Blob.of, st.binary(min_size=1, max_size=5000), st.sampled_from([1024, 2048]))
places = st.none() | st.sets(st.integers(0, 300), min_size=1).map(lambda found: chunks.as_ranges(sorted(found)))
models = st.builds(ModelRef, ids, blobs, st.just("int8"), st.none() | ids, st.none() | blobs, st.integers(0, 10**9),
                   st.none() | blobs, places, st.none() | blobs, st.none() | ids)
cohorts = st.builds(Cohort, st.none() | st.lists(names, max_size=5).map(tuple), st.none() | text, st.integers(0, 2**53))
manifests = st.builds(
    Manifest,
    v=st.just(1),
    fleet=names,
    round=st.integers(0, 10**9),
    seq=st.integers(0, 2**53),
    exp=st.integers(0, 2**53),
    deadline_s=st.floats(0.1, 1e6),
    method=st.builds(MethodRef, names, st.integers(0, 9), st.dictionaries(names, numbers | st.integers(-9, 9))),
    cohort=cohorts,
    model=models,
    graph=st.none() | blobs,
    serve=st.none() | models,
    layout=text,
    scalars=st.dictionaries(names, numbers, max_size=3),
    dual_epoch=st.integers(0, 10**9),
    counted=st.lists(
        st.builds(Counted, st.integers(0, 9), st.none() | st.lists(ids, max_size=3).map(tuple), st.none() | blobs),
        max_size=3,
    ).map(tuple),
    up=st.builds(UploadRules, st.integers(1, 2**30), st.integers(1024, 2**20), st.just(("fp32",))),
    open=st.booleans(),
    train=places,
)
uploads = st.builds(
    UploadManifest, blobs, codecs, ids, names, names, st.integers(0, 9), st.integers(0, 9),
    st.dictionaries(names, numbers, max_size=3), st.dictionaries(names, numbers, max_size=3),
    st.builds(Cost, st.integers(0, 9), st.floats(0, 9), st.none() | st.floats(0, 9)), train=places,
)
reports = st.builds(
    Report,
    round=st.integers(0, 10**9),
    boot=names,
    evaluated_round=st.none() | st.integers(0, 9),
    evaluations=st.lists(
        st.builds(Evaluation, st.sampled_from(["before", "after"]), names, st.just(((1, 2), (3, 4)))), max_size=2
    ).map(tuple),
    energy=st.lists(st.builds(Energy, names.map(lambda n: n[:16]), st.floats(0, 9), text, st.booleans())).map(tuple),
    traffic=st.none() | st.builds(Traffic, st.integers(0, 9), st.integers(0, 9)),
    flops=st.none() | st.floats(0, 1e18),
    pending=st.none() | st.builds(UpdateRef, st.integers(0, 9), ids),
    failed=text,
)
downs = st.builds(Down, st.sampled_from(["need", "done", "reject", "counted"]), st.integers(0, 9), ids, text)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in paths(item, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """``value`` with the part at ``path`` replaced."""
    if not path:
        return new
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


# messages -----------------------------------------------------------------------------------------------------------


@given(manifests | uploads | reports | downs | cohorts)
@settings(max_examples=80, deadline=None)
def test_a_message_is_read_as_it_was_written(message):
    assert messages.decode(type(message), messages.encode(message)) == message
    assert messages.decode(type(message), messages.encode(message, packed=messages.PACKED)) == message
    assert messages.decode(type(message), messages.encode(message, packed=messages.SHORT)) == message


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=25, deadline=None)
def test_foreign_bytes_are_a_message_or_a_message_error(kind, data):
    try:
        assert isinstance(messages.decode(kind, data), kind)
    except MessageError as error:
        str(error).encode()


@given(manifests | uploads | reports | downs, st.data())
@settings(max_examples=150, deadline=None)
def test_a_message_with_one_part_replaced_is_read_or_refused(message, data):
    value = json.loads(messages.encode(message))
    path = data.draw(st.sampled_from(paths(value)))
    mutated = json.dumps(replaced(value, path, data.draw(anything))).encode()
    try:
        again = messages.decode(type(message), mutated)
    except MessageError:
        return
    messages.encode(again)  # what was read can be written and logged
    repr(again).encode()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"null", b"[]", b"\xff", b"[" * 100_000, b'{"t":"done","r":' + b"9" * 5000 + b"}",
     b'{"t":"done","r":NaN}', b'{"t":"done","r":1e400}', b'{"t":"done","r":true}',
     b'{"t":"done","r":1,"reason":"\\ud800"}',
     b'{"t":"done","r":1,"id":"' + b"0" * 32 + b'\\n"}'],
)
def test_malformed_json_is_a_message_error(data):
    with pytest.raises(MessageError):
        messages.decode(Down, data)


def test_a_message_under_zstd_that_grows_beyond_its_limit_or_is_damaged_is_refused():
    bomb = compression.compress(b" " * 100_000 + messages.encode(Down("done", 3)))
    assert messages.decode(Down, bomb) == Down("done", 3)
    for data in (bomb[:-3], bomb + b"{}"):
        with pytest.raises(MessageError):
            messages.decode(Down, data)
    with pytest.raises(MessageError):
        messages.decode(Down, bomb, limit=100_000)


def test_a_message_with_the_dictionary_that_grows_beyond_its_limit_or_is_damaged_is_refused():
    content = messages.DICTIONARY.read_bytes()
    bomb = messages.SHORT_MARK + compression.compress(b" " * 100_000 + b'{"t":"done","r":3}', 12, dictionary=content)
    assert messages.decode(Down, bomb) == Down("done", 3)
    short = messages.encode(Report(1, boot="0" * 16, failed="x" * 100), packed=messages.SHORT)
    assert short.startswith(messages.SHORT_MARK)
    for data in (bomb[:-3], bomb + b"{}", short[:-1], short[1:], messages.SHORT_MARK, messages.SHORT_MARK + b"{}"):
        with pytest.raises(MessageError):
            messages.decode(Report if data in (short[:-1], short[1:]) else Down, data)
    with pytest.raises(MessageError):
        messages.decode(Down, bomb, limit=100_000)


def test_the_dictionary_is_what_every_version_of_that_number_has():
    """A changed word would make every message of the other version unreadable: write dictionary-2.txt instead."""
    assert hashlib.sha256(messages.DICTIONARY.read_bytes()).hexdigest() == (
        "fca280492aeca931fff1428c6c2baff716cc219eaffe0a9e2f440532fab5c80e")


def test_a_report_takes_a_third_of_its_bytes_with_the_dictionary():
    report = Report(
        7, boot="5e8a0f1c2b3d4e6f", traffic=Traffic(7233, 34314, payload={"model_down": 7101, "update_up": 2531}),
        flops=9102336000.0, absent_terms=(
            "compute: neither a sensor that can be read nor idle and busy watts with a source (edge-agent energy "
            "calibrate, or a profile with watts in device.toml)",),
    )
    sizes = [len(messages.encode(report, packed=form)) for form in (messages.PACKED, messages.SHORT)]
    assert 3 * sizes[1] < sizes[0]


@given(uploads, st.binary(min_size=1, max_size=300), st.sampled_from([messages.PLAIN, messages.PACKED, messages.SHORT]))
@settings(max_examples=40, deadline=None)
def test_a_whole_update_is_read_as_it_was_written(upload, data, form):
    made = replace(upload, blob=Blob.of(data, 1024))
    assert whole_update(with_its_bytes(made, data, packed=form)) == (made, data)


@given(uploads, st.binary(min_size=1, max_size=60), st.data())
@settings(max_examples=40, deadline=None)
def test_a_whole_update_with_another_byte_is_refused_or_has_the_same_bytes(upload, data, drawn):
    written = bytearray(with_its_bytes(replace(upload, blob=Blob.of(data, 1024)), data, packed=messages.PLAIN))
    at = drawn.draw(st.integers(0, len(written) - 1))
    written[at] = drawn.draw(st.integers(0, 255).filter(lambda new: new != written[at]))
    with contextlib.suppress(MessageError):
        assert whole_update(bytes(written))[1] == data, "another offer, which is checked as any other"


def test_a_field_that_has_its_default_is_not_sent():
    assert messages.encode(Down("done", 3)) == b'{"t":"done","r":3}'
    assert messages.encode(Presence("on", beat=True)) == b'{"st":"on","beat":true}'


def test_a_message_over_its_limit_is_refused_before_it_is_parsed():
    with pytest.raises(MessageError, match="bytes"):
        messages.decode(Down, b" " * (messages.MAX_MESSAGE_BYTES + 1))


def test_unknown_keys_are_ignored_and_missing_ones_have_their_defaults():
    assert messages.decode(Down, b'{"t":"done","r":3,"from_the_future":{"x":[1]}}') == Down("done", 3)


def test_a_malformed_message_names_the_keys_at_fault():
    with pytest.raises(MessageError, match=r"r: expected a whole number.*"):
        messages.decode(Down, b'{"t":"done","r":"x"}')


@pytest.mark.parametrize(
    "body",
    [{"traffic": {"mqtt_up": 10**40}}, {"traffic": {"mqtt_down": -1}}, {"traffic": {"wire_up": 2**63}},
     {"traffic": {"payload": {"update_up": 2**70}}}, {"judged_round": 10**12}, {"judged_round": -1},
     {"energy": [{"phase": "train", "joules": -1, "source": "", "measured": True}]}],
)
def test_a_report_of_impossible_figures_is_refused(body):
    with pytest.raises(MessageError):
        messages.decode(Report, json.dumps({"round": 1, **body}).encode())


# chunks -------------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=40_000), st.sampled_from([1024, 1500]), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_chunks_in_any_order_and_twice_make_the_blob(data, chunk, random):
    blob = Blob.of(data, chunk).check(len(data))
    inbox, parts = Inbox(blob, len(data)), cut(data, blob)
    order = [*range(blob.n), *range(blob.n // 2)]
    random.shuffle(order)
    seen: set[int] = set()
    for k in order:
        assert inbox.put(k, parts[k]) == (k not in seen)
        seen.add(k)
        assert inbox.missing() == sorted(set(range(blob.n)) - seen)
        assert inbox.missing(3) == inbox.missing()[:3]
        first = inbox.missing(1)
        assert inbox.missing_segment() == (first[0] // topics.SEGMENT if first else None)
    assert inbox.complete
    assert inbox.take() == data


@given(st.binary(min_size=1, max_size=9000), st.integers(-3, 20), st.binary(max_size=1100))
@settings(max_examples=60, deadline=None)
def test_a_chunk_that_is_not_the_blobs_is_refused(data, k, foreign):
    blob = Blob.of(data, 1024)
    inbox = Inbox(blob, len(data))
    if 0 <= k < blob.n and cut(data, blob)[k] == foreign:
        return
    with pytest.raises(MessageError):
        inbox.put(k, foreign)
    assert inbox.missing_count == blob.n


@pytest.mark.parametrize(
    ("change", "limit"),
    [({"size": 4097}, 9000), ({"n": 5}, 9000), ({"chunk": 2048}, 9000), ({"hashes": "0" * 63}, 9000),
     ({"root": "0" * 64}, 9000), ({}, 3999)],
)
def test_a_blob_that_contradicts_itself_or_is_too_large_takes_no_memory(change, limit):
    blob = Blob.of(bytes(range(250)) * 16, 1024)
    wrong = Blob(**{**schema.plain(blob), **change})
    with pytest.raises(MessageError):
        Inbox(wrong, limit)


def test_a_whole_of_right_chunks_with_another_root_is_refused():
    blob = Blob.of(b"x" * 3000, 1024)
    other = Blob(blob.id, blob.id + "0" * 32, blob.size, blob.chunk, blob.n, blob.hashes)
    inbox = Inbox(other, 3000)
    for k, part in enumerate(cut(b"x" * 3000, blob)):
        inbox.put(k, part)
    with pytest.raises(MessageError, match="root"):
        inbox.take()


@given(st.sets(st.integers(0, 300)))
def test_ranges_and_numbers_are_each_others_inverse(wanted):
    written = chunks.as_ranges(sorted(wanted))
    assert chunks.from_ranges(written, 301) == sorted(wanted)
    assert len(written) <= 4 * len(wanted) + 4


@given(st.text(string.digits + ",- x", max_size=30) | st.text(max_size=8))
def test_any_text_is_rising_numbers_below_the_limit_or_refused(written):
    try:
        found = chunks.from_ranges(written, 50)
    except MessageError:
        return
    assert found == sorted(set(found))
    assert all(0 <= n < 50 for n in found)


def test_a_huge_range_is_refused_without_being_built():
    with pytest.raises(MessageError):
        chunks.from_ranges("0-999999999", 1000)


# topics -------------------------------------------------------------------------------------------------------------


@given(names, names, st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), ids)
@settings(max_examples=40)
def test_every_topic_is_parsed_back_and_within_what_clouds_allow(fleet, device, number, k, blob):
    made = {
        topics.current(fleet): topics.Address("cur"),
        topics.server(fleet): topics.Address("srv"),
        topics.chunk(fleet, blob, k): topics.Address("b", key=blob, part=str(k)),
        topics.presence(fleet, device): topics.Address("st", device),
        topics.report(fleet, device): topics.Address("rep", device),
        topics.down(fleet, device): topics.Address("dn", device),
        topics.upload(fleet, device, number, k): topics.Address("up", device, str(number), str(k)),
        topics.upload(fleet, device, number, "m"): topics.Address("up", device, str(number), "m"),
        topics.question(fleet, device, "q1"): topics.Address("q", device, "q1"),
        topics.answer(fleet, device, "q1"): topics.Address("an", device, "q1"),
    }
    for topic, address in made.items():
        assert topics.parse(fleet, topic) == address
        assert topics.parse(fleet + "x", topic) is None
        assert topic.count("/") <= 6
        assert len(topic.encode()) <= 256


@given(st.text(max_size=40) | st.lists(st.text(max_size=9)).map(lambda parts: "/".join(["fl1", "f", *parts])))
def test_any_topic_is_parsed_without_an_exception(topic):
    address = topics.parse("f", topic)
    assert address is None or not address.device or topics.NAME.fullmatch(address.device)


@pytest.mark.parametrize("written", ["", "-1", "+1", "1.0", " 1", "1\n", "٣", "1" * 10, "1_0"])
def test_what_is_no_plain_number_is_none(written):
    assert topics.number(written) is None


@pytest.mark.parametrize("name", ["", "a/b", "a b", "+", "#", "ä", "a\n", "x" * 65])
def test_a_name_that_cannot_stand_in_a_topic_is_refused(name):
    with pytest.raises(ConfigError, match="is not a valid name of a device"):
        topics.check_name(name, "device")


# signed text --------------------------------------------------------------------------------------------------------

SIGNER = Signer(bytes(range(32)))
VERIFIER = Verifier(SIGNER.public)


bodies = st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: messages.SHORT_MARK + rest)


@given(bodies)
@settings(max_examples=30)
def test_what_was_signed_comes_back_byte_for_byte(body):
    assert VERIFIER.verify(SIGNER.sign(body)) == body


@given(bodies, st.data())
@settings(max_examples=120, deadline=None)
def test_signed_text_with_any_byte_changed_is_refused(body, data):
    signed = bytearray(SIGNER.sign(body))
    at = data.draw(st.integers(0, len(signed) - 1))
    new = data.draw(st.integers(0, 255))
    changed = bytes(signed[:at]) + bytes([new]) + bytes(signed[at + 1 :])
    upper_hex = changed.lower() == bytes(signed).lower() and not body.startswith(messages.SHORT_MARK)
    if changed == bytes(signed) or upper_hex:
        return
    with pytest.raises(MessageError):
        VERIFIER.verify(changed)


def test_a_short_message_has_a_short_signature():
    assert len(SIGNER.sign(b"{}")) - len(SIGNER.sign(messages.SHORT_MARK + b"}")) == 48


@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda tail: b"ed25519:" + tail))
def test_foreign_bytes_carry_no_signature(data):
    with pytest.raises(MessageError):
        VERIFIER.verify(data)


def test_another_fleets_signature_is_refused_by_the_name_of_its_key():
    with pytest.raises(MessageError, match="is signed by key"):
        VERIFIER.verify(Signer(bytes(32)).sign(b"x"))


@pytest.mark.parametrize("key", ["", "xx", "00", "ü" * 64, "0" * 63])
def test_what_is_no_key_is_a_config_error(key):
    with pytest.raises(ConfigError):
        Verifier(key)


@pytest.mark.parametrize("load", [Signer.load, load_public])
@pytest.mark.parametrize("data", [b"", b"no key", b"\xff\xfe", b"00" * 31, b"00" * 33, b"0" * 1025, "٣".encode() * 64])
def test_a_file_that_holds_no_key_is_named_with_what_to_do(tmp_path, load, data):
    path = tmp_path / "fleet.key"
    path.write_bytes(data)
    with pytest.raises(StateError) as caught:
        load(path)
    assert (caught.value.where, caught.value.expected) == (str(path), "64 hex digits")
    assert "from a backup" in str(caught.value)
    assert not storage.is_disk_error(caught.value)


@pytest.mark.parametrize("load", [Signer.load, load_public])
@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.symlink_to(path)])
def test_a_key_that_is_absent_or_cannot_be_read_is_of_the_disk_and_named_with_what_to_do(tmp_path, load, make):
    path = tmp_path / "fleet.key"
    make(path)
    with pytest.raises(StateError, match="cannot be read") as caught:
        load(path)
    assert caught.value.where == str(path)
    assert "from a backup" in str(caught.value)
    assert storage.is_disk_error(caught.value)


def test_a_key_comes_back_from_its_file(tmp_path):
    made = Signer.create(tmp_path / "fleet.key")
    assert Signer.load(tmp_path / "fleet.key").public == made.public
    (tmp_path / "fleet.pub").write_text(f"{made.public}\n")
    assert load_public(tmp_path / "fleet.pub") == made.public


# schema and configuration -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    size: int = field(default=1, metadata={"min": 0, "max": 9})
    names: tuple[str, ...] = field(default=(), metadata={"max_length": 3})


@dataclass(frozen=True)
class Outer:
    word: str = field(metadata={"choices": ("red", "blue")})
    share: float = field(default=0.5, metadata={"above": 0, "max": 1})
    flag: bool = False
    maybe: int | None = None
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()


@given(anything)
@settings(max_examples=100)
def test_any_value_is_an_object_or_a_list_of_problems(data):
    value, problems = schema.read(Outer, data)
    assert (value is None) == bool(problems)
    assert all(isinstance(str(problem), str) for problem in problems)


def test_every_problem_is_named_at_once_with_the_nearest_known_word():
    wrong = {"word": "rad", "shre": 1, "share": 0, "flag": 1, "inner": {"size": 10}, "many": [3]}
    _, problems = schema.read(Outer, wrong)
    assert [str(p) for p in problems] == [
        "shre: unknown key (did you mean 'share'?)",
        "word: unknown value 'rad', expected one of blue, red (did you mean 'red'?)",
        "share: 0 must be above 0",
        "flag: expected true or false, found a whole number",
        "inner.size: 10 is over the limit of 9",
        "many[0]: expected a table, found a whole number",
    ]


scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | text
tables = st.recursive(
    st.dictionaries(names, scalars | st.lists(st.integers(0, 9) | text, max_size=3), max_size=4),
    lambda inner: st.dictionaries(names, inner | scalars | st.lists(inner, min_size=1, max_size=2), max_size=3),
    max_leaves=6,
)


@given(tables)
@settings(max_examples=100, deadline=None)
def test_a_table_written_as_toml_is_read_back(table):
    assert tomllib.loads(config.toml(table)) == table


def test_a_mistake_in_a_file_is_named_with_file_line_and_suggestion():
    with pytest.raises(ConfigError) as caught:
        config.parse(Outer, 'word = "red"\n\n[inner]\nsize = 1\nsizes = 2\n', "a.toml")
    assert str(caught.value) == "a.toml:5: inner.sizes: unknown key (did you mean 'size'?)"


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_a_config_error(written):
    with contextlib.suppress(ConfigError):
        assert isinstance(config.parse(Outer, written, "a.toml"), Outer)


# cohorts ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**53), st.integers(0, 10**6), st.sets(names, min_size=1, max_size=200), st.integers(0, 210))
@settings(max_examples=60, deadline=None)
def test_the_announced_cohort_is_the_one_that_was_chosen_whether_listed_or_by_rule(seed, number, devices, size):
    chosen = cohort.select(seed, number, devices, size)
    assert len(chosen) == min(size or len(devices), len(devices))
    announced = cohort.announce(seed, number, chosen)
    assert (announced.devices is None) == (len(chosen) > cohort.LISTED)
    assert [name for name in sorted(devices) if cohort.includes(announced, number, name)] == chosen
    assert chosen == cohort.select(seed, number, sorted(devices, reverse=True), size)


def test_the_rule_chooses_what_the_list_chooses():
    devices = [f"d{n}" for n in range(200)]
    chosen = cohort.select(7, 3, devices, 100)
    limit = max(cohort.rank(7, 3, name) for name in chosen)
    listed, ruled = Cohort(devices=tuple(chosen)), Cohort(rule="rank", seed=7, limit=limit)
    assert [cohort.includes(listed, 3, d) for d in devices] == [cohort.includes(ruled, 3, d) for d in devices]
    assert chosen != cohort.select(7, 4, devices, 100) != cohort.select(8, 4, devices, 100)


def test_an_unknown_rule_asks_nobody():
    assert not cohort.includes(Cohort(rule="by-moonlight", limit="f" * 16), 1, "d0")


def test_answers_of_tasks_are_tables_for_people() -> None:
    several = Answer(outputs=("speech", "rain"), label_sets=((), ("rain",)), probabilities=((0.1, 0.2), (0.0, 1.0)))
    assert several.of_task == ([("0", "none", "speech 0.100 rain 0.200"), ("1", "rain", "speech 0.000 rain 1.000")],
                               ("sample", "labels", "probabilities"))
    score = Answer(outputs=("score",), values=((0.5,), (2.0,)), threshold=1.0, alarms=(False, True))
    assert score.of_task == ([("0", "0.5", "1", "-"), ("1", "2", "1", "ALARM")],
                             ("sample", "score", "threshold", "alarm"))
    numbers = Answer(outputs=("speed",), values=((120.5,),))
    assert numbers.of_task == ([("0", "120.5")], ("sample", "speed"))
    assert Answer(labels=("a",), probabilities=((1.0,),)).of_task is None
