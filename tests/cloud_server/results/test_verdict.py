"""Whether a fleet is any good: the rule by hand, and real fleets that learn and that only memorise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.commands import server
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Alone, Device, Evaluation, Round
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import closing_table
from cloud_server.results import result
from cloud_server.results.result import score_of
from cloud_server.results.verdict import DeviceAnswers, Verdict, WarningLog, lines, of_ledger, verdict
from edge_agent.inference import worse_model_check
from fleet_core.base.errors import MessageError
from fleet_core.data.samples import Samples
from fleet_core.protocol import device_messages, messages
from fleet_core.protocol.device_messages import Report
from fleet_core.tasks.calibration import BINS
from tests.support import homes
from tests.support.inprocess import World, config_text, toy, without_fsync, world

SAMPLES = 3000


def counts(shares: list[float], right: float, samples: int = SAMPLES) -> np.ndarray[Any, Any]:
    """Confusion counts of classes with these shares of the samples, ``right`` of each answered correctly and the other
    answers spread over the other classes."""
    n = len(shares)
    wrong = (1 - right) / max(1, n - 1)
    return np.array([[round(samples * shares[k] * (right if k == j else wrong)) for j in range(n)] for k in range(n)])


def evaluated(fleet: Any, alone: Any = None, frequent: int = 0, devices: int = 1, **more: Any) -> Verdict:
    found = verdict([DeviceAnswers(fleet, frequent, alone)] * devices, **more)
    assert found is not None
    return found


EVEN = [1 / 3] * 3


# The rule -------------------------------------------------------------------------------------------------------------


def test_a_fleet_at_chance_is_warned_of_and_what_it_memorised_is_reported() -> None:
    found = evaluated(counts(EVEN, 0.395), loss=4.6e-6)
    (warning,) = found.warnings
    assert warning.startswith("memorised: loss 4.6e-06, accuracy near chance: 0.39")
    assert "most frequent class alone has 0.333" in warning
    assert "'metafleet advise FILE'" in warning
    (other,) = evaluated(counts(EVEN, 0.395), loss=0.9).warnings
    assert other.startswith("accuracy near chance: 0.395")


def test_where_the_plain_baseline_is_at_chance_too_the_labels_are_suspected() -> None:
    mixed, learnable = (
        evaluated(counts(EVEN, 0.35), counts(EVEN, 0.34)),
        evaluated(counts(EVEN, 0.35), counts(EVEN, 0.9)),
    )
    assert "labels are mixed up" in mixed.warnings[0]
    assert [text.partition(":")[0] for text in learnable.warnings] == ["accuracy near chance",
                                                                        "a device alone answers better"]
    assert "mixed up" not in learnable.warnings[0]


def test_a_fleet_that_a_device_alone_beats_is_warned_of_and_one_that_is_as_good_is_not() -> None:
    (warning,) = evaluated(counts(EVEN, 0.71), counts(EVEN, 0.93)).warnings
    assert "has accuracy 0.930, the fleet's model 0.710 on 3000 held-back samples of 1 device" in warning
    assert evaluated(counts(EVEN, 0.93), counts(EVEN, 0.93)).warnings == ()
    assert evaluated(counts(EVEN, 0.91), counts(EVEN, 0.93)).warnings == ()
    assert len(evaluated(counts(EVEN, 0.88), counts(EVEN, 0.93)).warnings) == 1
    assert evaluated(counts(EVEN, 0.93)).warnings == ()


@pytest.mark.parametrize("samples", [6, 15, 30, 60])
def test_few_samples_are_no_reason_to_warn(samples: int) -> None:
    assert evaluated(counts(EVEN, 0.5, samples), counts(EVEN, 0.6, samples), loss=0.001).warnings == ()


def test_a_training_loss_near_zero_takes_half_the_margin() -> None:
    few = counts(EVEN, 0.38, 192)
    assert evaluated(few, loss=0.3).warnings == ()
    assert evaluated(few, loss=0.001).warnings[0].startswith("memorised: loss 0.001, accuracy near chance: 0.375")


def test_counts_are_pooled_so_that_tiny_devices_weigh_little() -> None:
    good, tiny = DeviceAnswers(counts(EVEN, 0.9, 600), 0), DeviceAnswers(counts(EVEN, 0.0, 6), 0)
    found = verdict([good, *[tiny] * 10])
    assert found is not None
    assert (found.devices, found.samples, found.warnings) == (11, 660, ())


def test_one_class_that_is_nearly_all_of_the_samples_is_evaluated_by_macro_f1_too() -> None:
    """Heartbeats: 91 % are normal. The fleet that finds the rare ones is good although its accuracy equals always
    answering normal; the fleet that always answers normal is not."""
    finds = np.array([[510, 20, 16], [4, 26, 0], [4, 0, 20]])
    always = np.array([[546, 0, 0], [30, 0, 0], [24, 0, 0]])
    assert np.trace(finds) / finds.sum() < 0.93
    assert evaluated(finds).warnings == ()
    assert evaluated(always).warnings[0].startswith("accuracy near chance: 0.910")


def test_devices_of_one_class_each_leave_nothing_to_gain_and_are_not_warned_of() -> None:
    alone = [DeviceAnswers(np.diag([200.0 * (k == j) for j in range(3)]), k) for k in range(3)]
    found = verdict(alone)
    assert found is not None
    assert (found.frequent.accuracy, found.warnings) == (1.0, ())


def test_random_answers_of_any_number_of_devices_never_look_good_when_there_are_many_samples() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        y, answers = rng.integers(0, 4, 2000), rng.integers(0, 4, 2000)
        table = np.zeros((4, 4), np.int64)
        np.add.at(table, (y, answers), 1)
        assert evaluated(table).warnings


def test_nothing_evaluated_is_no_verdict() -> None:
    assert verdict([]) is None
    assert verdict([DeviceAnswers(np.zeros((2, 2)), 0)]) is None
    assert lines(None) == []


# The ledger -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as made:
        made.put(Device(name="a", took_part=True), Device(name="b", took_part=True), Device(name="old"))
        made.put(Round(round=2, opened_at=1.0, status="closed", loss=0.001))
        yield made


def book(ledger: Ledger, device: str, right: float, number: int = 2, alone: float | None = 0.9) -> None:
    row = result.evaluation(number, device, "after", "fedavg", counts(EVEN, right).tolist())
    assert row is not None
    ledger.put(row, replace(row, stage="before", confusion=((0,) * 3,) * 3))
    if alone is not None:
        table = tuple(map(tuple, counts(EVEN, alone).tolist()))
        ledger.put(Alone(round=number, device=device, frequent=0, method="nearest mean", confusion=table))


def test_the_last_evaluations_of_devices_that_said_what_they_do_alone_are_taken(ledger: Ledger) -> None:
    assert of_ledger(ledger) is None
    book(ledger, "a", 0.2, number=1)
    book(ledger, "a", 0.7)
    book(ledger, "b", 0.8)
    book(ledger, "old", 0.1, alone=None)
    found = of_ledger(ledger)
    assert found is not None
    assert (found.round, found.devices, round(found.fleet.accuracy, 6)) == (2, 2, 0.75)
    assert len(found.warnings) == 1
    ledger.put(Device(name="a", status="revoked"))
    again = of_ledger(ledger)
    assert again is not None
    assert again.devices == 1


def test_each_warning_is_logged_once_devices_have_reported_and_half_of_the_rounds_are_done(
    ledger: Ledger,
) -> None:
    lines: list[str] = []
    watch = WarningLog(ledger, 4, lines.append)
    book(ledger, "a", 0.3, number=1)
    watch.reported("a", 1, {"a"})
    assert lines == []
    book(ledger, "a", 0.3)
    watch.reported("a", 2, {"a", "b"})
    assert lines == []
    book(ledger, "b", 0.3)
    for _ in range(2):
        watch.reported("b", 2, {"a", "b"})
    assert [text.partition(": ")[0] for text in lines] == ["warning"] * 2
    assert "after round 2: memorised: loss 0.001, accuracy near chance" in lines[0]


def test_report_result_and_closing_table_show_the_warnings(ledger: Ledger) -> None:
    book(ledger, "a", 0.3)
    made = result.build(ledger, method="fedavg", seed=0, config={})
    plain = result.to_json(made)
    assert result.validate(plain) == []
    assert result.parse(json.loads(json.dumps(plain))).verdict == made.verdict
    assert "warning: memorised: " in closing_table(made)
    page = render(plain, title="x")
    assert "Is the fleet any good?" in page
    assert 'role="alert">Warning: memorised: ' in page
    del plain["verdict"]
    assert "any good" not in render(plain, title="x")


# Real fleets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    without_fsync(monkeypatch)
    made: list[World] = []

    def make(mixed_up: bool) -> World:
        w = world(tmp_path / str(len(made)), config_text(rounds=2, devices=2))
        made.append(w)
        w.start_server()
        for n in range(2):
            samples = toy(n, 300)
            y = np.random.default_rng(n).permutation(samples.y) if mixed_up else samples.y
            w.start_agent(f"d{n}", Samples(samples.x, y, None, samples.time, samples.classes))
        assert w.pump(lambda: w.server.finished and len(w.server.ledger.rows(Alone)) == 2)
        return w

    yield make
    for each in made:
        each.close()


def test_a_fleet_whose_labels_mean_nothing_is_warned_of_in_log_and_status_and_a_good_one_is_not(
    fleet: Callable[..., World], capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = fleet(mixed_up=True), fleet(mixed_up=False)
    assert bad.logged("warning: after round 2: accuracy near chance")
    assert bad.logged("labels are mixed up")
    assert not good.logged("warning: ")
    found = of_ledger(good.server.ledger)
    assert found is not None
    assert found.alone is not None
    assert (found.samples, found.warnings) == (240, ())
    assert min(found.fleet.accuracy, found.alone.accuracy) > 0.9 > found.frequent.accuracy
    server.status(bad.fleet.folder)
    assert "warning: accuracy near chance: 0." in capsys.readouterr().out
    server.status(good.fleet.folder, as_json=True)
    result = json.loads(capsys.readouterr().out)["verdict"]
    assert (result["devices"], result["warnings"]) == (2, [])


# On the device, and on the wire ---------------------------------------------------------------------------------------


def test_a_device_measures_what_it_does_alone_once_for_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0", toy(1, 200)), "pfldyn-proto")
    found = service.alone()
    assert found is not None
    assert (np.sum(found.confusion), len(found.confusion)) == (80, 3)
    assert np.trace(found.confusion) > 72
    assert found.frequent == int(np.bincount(service.local().own().y).argmax())
    monkeypatch.setattr(worse_model_check, "MAX_CLASSES", 2)
    assert worse_model_check._baseline(service.local()) == device_messages.Alone(found.frequent)
    monkeypatch.setattr(worse_model_check, "_baseline", lambda data: None)
    assert service.alone() == found
    service.local().add(toy(9, 3).x, ["a", "b", "c"])
    assert service.alone() is None


def test_reports_of_older_agents_are_read_and_absent_values_are_not_sent() -> None:
    old = b'{"round": 1, "boot": "x", "judged_round": 1, "judgements": []}'
    assert messages.decode(Report, old).alone is None
    assert messages.decode(Report, old).evaluated_round == 1
    assert b'"judged_round":2' in messages.encode(Report(round=2, evaluated_round=2))
    assert b"alone" not in messages.encode(Report(round=1))
    with pytest.raises(MessageError):
        messages.decode(Report, b'{"round": 1, "alone": {"frequent": -1}}')


def test_a_report_whose_counts_are_of_other_classes_is_refused(fleet: Callable[..., World]) -> None:
    w = fleet(mixed_up=False)
    before = w.server.ledger.rows(Alone)
    for alone in (device_messages.Alone(3), device_messages.Alone(0, "x", ((1, 2), (3, 4)))):
        with pytest.raises(MessageError):
            w.server._device_messages.on_report("d0", Report(round=2, evaluated_round=2, alone=alone))
    assert (w.server.ledger.rows(Alone), len(w.server.ledger.rows(Evaluation, stage="after"))) == (before, 2)


def test_the_fleets_calibration_error_follows_from_what_its_devices_report(fleet: Callable[..., World]) -> None:
    w = fleet(mixed_up=False)
    rows = w.server.ledger.rows(Evaluation, stage="after")
    found = of_ledger(w.server.ledger)
    samples = sum(sum(map(sum, row.confusion)) for row in rows)
    assert found is not None
    together = np.sum([row.gaps for row in rows], axis=0)
    assert found.fleet.calibration_error == pytest.approx(np.abs(together).sum() / samples)
    assert 0 < np.abs(together).sum() < samples
    for name, agent in w.agents.items():
        (row,) = [one for one in rows if one.device == name]
        held_back = agent.service.held_back()
        assert held_back is not None
        assert score_of(row).calibration_error == pytest.approx(held_back.figures["calibration_error"], abs=1e-4)


def test_gaps_that_cannot_be_of_these_answers_are_refused(fleet: Callable[..., World]) -> None:
    w = fleet(mixed_up=False)
    before = w.server.ledger.rows(Evaluation, device="d0")
    one = device_messages.Evaluation("after", "fedavg", ((1, 0, 0), (0, 1, 0), (0, 0, 1)))
    most = (0.0,) * (BINS - 1)

    def of(said: device_messages.Evaluation) -> Report:
        return Report(round=2, evaluated_round=2, evaluations=(said,))

    for gaps in ((3.1, *most), most, (*most, -2.0, 0.0)):
        with pytest.raises(MessageError, match="gaps"):
            w.server._device_messages.on_report("d0", of(replace(one, gaps=gaps)))
    assert w.server.ledger.rows(Evaluation, device="d0") == before
    w.server._device_messages.on_report("d0", of(replace(one, gaps=(*most, -3.0))))
    assert w.server.ledger.rows(Evaluation, device="d0", stage="after")[-1].gaps == (*most, -3.0)
