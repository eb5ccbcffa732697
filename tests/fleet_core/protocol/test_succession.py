"""A device follows its fleet's key as far as old keys have signed the new ones, and never back, aside or past a cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleet_core.base.errors import MessageError
from fleet_core.protocol import messages, succession
from fleet_core.protocol.signing import Signer
from fleet_core.protocol.succession import MOST, Keyring, Succession

NOW = 1_700_000_000
KEYS = [Signer(bytes([n]) * 32) for n in range(1, MOST + 5)]


def succeeds(number: int, old: Signer, new: Signer, **other: Any) -> str:
    plain = Succession("t", number, old.public, new.public, NOW, NOW + 1000)
    signer = other.pop("signer", old)
    assert isinstance(signer, Signer)
    return signer.sign(messages.encode(replace(plain, **other))).decode()


CHAIN = [succeeds(n + 1, old, new) for n, (old, new) in enumerate(pairwise(KEYS))]


def ring(anchor: int = 0, *links: str, now: int = NOW) -> Keyring:
    return Keyring(KEYS[anchor].public, links, fleet="t", now=lambda: now)


def test_both_keys_count_until_the_overlap_ends_and_then_the_new_one_alone() -> None:
    found = ring().extended(CHAIN[:1])
    assert found is not None
    for signer in KEYS[:2]:
        assert found.verify(signer.sign(b"x")) == b"x"
    with pytest.raises(MessageError, match="signed by key"):
        found.verify(KEYS[2].sign(b"x"))
    later = ring(0, *found.links, now=NOW + 1000)
    assert later.verify(KEYS[1].sign(b"x")) == b"x"
    with pytest.raises(MessageError, match="signed by key"):
        later.verify(KEYS[0].sign(b"x"))


def test_a_device_that_was_off_follows_the_whole_chain_from_any_of_its_keys() -> None:
    for anchor in range(4):
        found = ring(anchor, now=NOW + 5000).extended(CHAIN[:4])
        assert found is not None
        assert (found.newest, found.number) == (KEYS[4].public, 4)
        again = ring(anchor, *found.links)
        assert again.newest == found.newest
        assert again.extended(CHAIN[:4]) is None
    assert ring(4).extended(CHAIN[:4]) is None


FORGED = {
    "another signer": [succeeds(1, KEYS[0], KEYS[9], signer=KEYS[8])],
    "another fleet": [succeeds(1, KEYS[0], KEYS[1], fleet="u")],
    "changed": [CHAIN[0].replace(KEYS[1].public, KEYS[9].public)],
    "no overlap": [succeeds(1, KEYS[0], KEYS[1], until=NOW - 1)],
    "an endless overlap": [succeeds(1, KEYS[0], KEYS[1], until=NOW + succession.MAX_OVERLAP_S + 1)],
    "wrong order": [CHAIN[1], CHAIN[0]],
    "a gap": [CHAIN[0], CHAIN[2]],
    "a number left out": [CHAIN[0], succeeds(3, KEYS[1], KEYS[2])],
    "no signature": ["{}"],
    "no succession": [KEYS[0].sign(b"{}").decode()],
    "too long": ["x" * 2000],
    "too many": CHAIN[:MOST] + CHAIN[:1],
    "of other keys": CHAIN[3:5],
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_succession_is_refused(what: str) -> None:
    with pytest.raises(MessageError):
        ring().extended(FORGED[what])


def test_an_old_succession_is_refused_and_so_is_one_that_leads_back() -> None:
    found = ring(0, *CHAIN[:2])
    for links in (CHAIN[:1], [succeeds(1, KEYS[2], KEYS[0])], [succeeds(2, KEYS[2], KEYS[0])]):
        with pytest.raises(MessageError, match="old one"):
            found.extended(links)
    with pytest.raises(MessageError, match="do not begin"):
        found.extended([succeeds(7, KEYS[2], KEYS[0])])


def test_a_cut_drops_every_earlier_key_at_once_and_leads_nobody_on_when_it_is_over() -> None:
    cut = succeeds(2, KEYS[1], KEYS[2], cut=True)
    found = ring(0, CHAIN[0]).extended([CHAIN[0], cut])
    assert found is not None
    assert found.accepted() == [KEYS[2].public]
    with pytest.raises(MessageError, match="has cut") as told:
        ring(0, now=NOW + 1001).extended([CHAIN[0], cut])
    assert "token" in str(told.value.hint)
    assert ring(0, CHAIN[0], cut, now=NOW + 9999).newest == KEYS[2].public, "what was followed in time stays"


def test_the_links_of_another_anchor_count_for_nothing_and_a_later_anchor_begins_in_the_middle() -> None:
    assert ring(9, *CHAIN[:3]).newest == KEYS[9].public
    assert ring(1, *CHAIN[:3]).links == tuple(CHAIN[1:3])


def test_a_device_follows_so_many_successions_from_its_token_and_no_more(tmp_path: Path) -> None:
    found = ring(0, *CHAIN[:MOST])
    with pytest.raises(MessageError, match="since this device's token"):
        found.extended(CHAIN[2:MOST + 1])
    assert len("".join(CHAIN[:MOST])) < succession.MAX_BYTES // 2
