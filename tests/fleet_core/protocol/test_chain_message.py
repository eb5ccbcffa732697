"""The list of a chain's links: read as it was written, bounded, and only if it leads to the wanted base."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.base.compression import compress
from fleet_core.base.errors import MessageError
from fleet_core.protocol import chain_message
from fleet_core.protocol.chain_message import MAX_LINKS, Chain
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import ModelRef


def model(number: int) -> str:
    return f"{number:032x}"


def chain(first: int, last: int, *, seed: bool = False) -> Chain:
    """Links of the rounds ``first`` to ``last``; the model of a round has its number."""
    links = [
        ModelRef(model(n), Blob.of(b"delta %d" % n, 1024), "int8", model(n - 1), round=n)
        for n in range(first, last + 1)
    ]
    if seed:
        links[0] = replace(links[0], codec="drawn", base=None)
    return Chain(tuple(links))


@pytest.mark.parametrize("made", [chain(1, 1, seed=True), chain(1, MAX_LINKS, seed=True), chain(7, 9)])
def test_a_chain_is_read_as_it_was_written(made: Chain) -> None:
    assert Chain.decode(made.encode(), made.links[-1].model) == made


def test_a_chain_that_leads_elsewhere_or_lacks_a_link_is_refused() -> None:
    sound = chain(3, 9)
    gap = Chain((*sound.links[:2], *sound.links[3:]))
    second_start = Chain((*sound.links[:2], *chain(5, 9, seed=True).links))
    turned = Chain(tuple(reversed(sound.links)))
    for made, base in [(sound, model(8)), (gap, model(9)), (second_start, model(9)), (turned, model(3)),
                       (Chain(()), model(9))]:
        with pytest.raises(MessageError, match="missing link"):
            Chain.decode(made.encode(), base)


def test_a_chain_with_a_blob_that_is_none_is_refused() -> None:
    first, last = chain(3, 4).links
    for wrong in ({"n": 2}, {"size": 5000}, {"id": "0" * 32}):
        with pytest.raises(MessageError):
            Chain.decode(Chain((first, replace(last, blob=replace(last.blob, **wrong)))).encode(), last.model)


def test_more_links_than_64_are_refused() -> None:
    with pytest.raises(MessageError, match="65 items are over the limit of 64"):
        Chain.decode(chain(1, MAX_LINKS + 1).encode(), model(MAX_LINKS + 1))


def test_what_decompresses_to_more_than_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_message, "MAX_CHAIN_BYTES", 10_000)
    with pytest.raises(MessageError):
        Chain.decode(compress(b" " * 1_000_000), model(1))


@given(st.binary(max_size=100) | st.binary(max_size=100).map(compress))
@settings(max_examples=50, deadline=None)
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        Chain.decode(data, model(1))


@pytest.mark.parametrize("wrong", [None, {}, {"links": {}}, {"links": [{}]}, {"links": [[]]}])
def test_json_that_is_no_chain_is_refused(wrong: Any) -> None:
    with pytest.raises(MessageError, match="malformed"):
        Chain.decode(compress(json.dumps(wrong).encode()), model(1))


def test_a_long_list_costs_80_bytes_a_link_at_most() -> None:
    links, before = [], model(0)
    for n in range(MAX_LINKS):
        blob = Blob.of(b"%d" % n, 61440)
        links.append(ModelRef(Blob.of(b"model %d" % n, 1024).id, blob, "ternary", before, round=n))
        before = links[-1].model
    assert len(Chain(tuple(links)).encode()) < 80 * MAX_LINKS
