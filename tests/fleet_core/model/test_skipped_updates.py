"""When an update is too small to be sent, and the note that goes in its place."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.dyn import Dyn
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import CodecError
from fleet_core.codecs.kinds.registry import CODECS, NOTHING
from fleet_core.model import payloads, skipped_updates
from fleet_core.model.encoded_update import RESIDUAL, encode_update
from fleet_core.model.layout import MODEL_GROUPS as GROUPS
from fleet_core.model.skipped_updates import FACT, WINDOW, Measured, least_norm
from tests.support.quadratics import LAYOUT, SIZE, tree, vector


def params(value: float, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Arrays of that norm."""
    vector = np.random.default_rng(seed).normal(size=SIZE)
    return trees.apply(lambda a: a.astype(np.float32), tree(vector * value / np.linalg.norm(vector)))


def update(device: str, value: float) -> Update:
    return Update(device, Payload(params(value, len(device))), 1)


def passed(share: float, facts: dict[str, str], *norms: float) -> dict[str, str]:
    """The facts after a round with updates of these norms."""
    measured = Measured([update("d" * (k + 1), norm) for k, norm in enumerate(norms)], share)
    for _ in range(2):  # a rule may read them again
        list(measured)
    return measured.facts(facts)


# The measure ----------------------------------------------------------------------------------------------------------


def test_the_measure_is_a_share_of_the_mean_norm_of_the_last_rounds() -> None:
    facts = passed(0.5, {"members": "2"}, 1.0, 3.0)
    assert facts["members"] == "2"
    assert least_norm(0.5, facts) == pytest.approx(1.0)
    assert least_norm(0.5, passed(0.5, facts, 0.0, 0.0)) == pytest.approx(0.5), "one that was skipped counts as zero"
    assert least_norm(0.5, {}) == 0.0, "in the first round all are sent"


def test_rounds_longer_ago_are_forgotten_so_that_no_fleet_falls_silent_for_good() -> None:
    facts = passed(1.0, {}, 1e6)
    for _ in range(WINDOW):
        assert least_norm(1.0, facts) > 0
        facts = passed(1.0, facts, 0.0)
    assert least_norm(1.0, facts) == 0.0


def test_where_nothing_is_to_be_skipped_nothing_is_measured_and_what_was_is_dropped() -> None:
    assert FACT not in passed(0.0, {}, 1.0)
    assert passed(0.0, {FACT: "1.0", "members": "2"}, 1.0) == {"members": "2"}


def test_the_measure_has_the_same_bits_in_any_order_and_after_a_restart() -> None:
    updates = [update("d" * k, 0.1 * k) for k in range(1, 5)]
    found = set()
    for order in itertools.permutations(updates):
        measured = Measured(order, 0.3)
        list(measured)
        found.add(least_norm(0.3, measured.facts({})))
    assert len(found) == 1


# The note -------------------------------------------------------------------------------------------------------------


def sent(name: str, own: trees.Params, residual: trees.Params | None, least: float) -> payloads.Sent:
    return payloads.send(name, own, residual, LAYOUT, GROUPS, (0,), least)


@pytest.mark.parametrize("name", CODECS)
def test_a_small_update_is_a_note_of_zeros_and_waits_as_residual_whatever_the_codec(name: str) -> None:
    own, before = params(0.3), params(0.2, seed=1)
    intended = trees.add(own, before)
    found = sent(name, own, before, 2 * payloads.norm(intended))
    assert (found.codec, len(found.data), found.error, found.left) == (NOTHING.name, 8, None, None)
    assert found.residual is not None
    assert vector(found.residual).tobytes() == vector(intended).tobytes()
    read = payloads.decode(NOTHING.name, found.data, LAYOUT, GROUPS)
    assert payloads.norm(read) == payloads.norm(found.decoded) == 0
    after = sent("fp32", params(1.0, seed=2), found.residual, 0.0)
    assert payloads.norm(trees.subtract(after.decoded, trees.add(params(1.0, seed=2), intended))) < 1e-6


def test_one_of_the_least_norm_itself_is_sent_and_what_waits_counts() -> None:
    own = params(0.5)
    assert sent("int8", own, None, payloads.norm(own)).codec == "int8"
    assert sent("int8", own, own, 0.9).codec == "int8"
    assert sent("int8", own, trees.scale(own, -1.0), 0.1).codec == NOTHING.name
    assert sent("int8", trees.zeros_like(own), None, 0.0).codec == "int8", "0: every update is sent"


def test_notes_of_other_trainings_have_other_bytes() -> None:
    notes = [sent("int8", params(0.1, seed), None, 1.0).data for seed in (0, 0, 1)]
    assert notes[0] == notes[1] != notes[2]


@pytest.mark.parametrize("data", [b"", b"1234567", b"123456789"])
def test_bytes_that_are_no_note_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        payloads.decode(NOTHING.name, data, LAYOUT, GROUPS)


def test_a_value_that_is_not_finite_is_not_hidden_by_a_note() -> None:
    bad = params(0.1)
    bad["head"]["c"][:] = np.nan
    with pytest.raises(CodecError, match="not finite"):
        sent("int8", bad, None, 1.0)


def test_users_do_not_choose_it() -> None:
    assert NOTHING.name not in CODECS


def test_the_dual_of_a_device_that_skips_follows_its_own_update_and_the_residual_keeps_it() -> None:
    own, dual = params(0.1), {"dual": params(1.0, seed=3)}
    made = encode_update(
        "int8-plain", Payload(own, {}), dual, {}, method=METHODS["pfldyn-proto"], hyper=Dyn(), layout=LAYOUT,
        round_number=1.0, seed=(0,), least_norm=1.0,
    )
    assert made.skipped
    assert made.state == {**dual, RESIDUAL: own}
    assert skipped_updates.is_note(made.codec)
