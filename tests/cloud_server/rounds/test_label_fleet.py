"""A fleet whose samples carry any number of labels: two agents train, personalize, answer and report F1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metafleet
from cloud_server.ledger.ledger_tables import Alone, Evaluation, TaskEvaluation
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import closing_table, round_line, snapshot
from cloud_server.results import outcome, result
from edge_agent.commands import device_commands, review
from edge_agent.commands.review import likely
from edge_agent.commands.run import figures_of
from edge_agent.http import metrics
from edge_agent.http.http_messages import Head, Request
from edge_agent.http.inference_protocol import InferenceProtocol
from edge_agent.http.serve import ServedModel
from edge_agent.inference import relearn
from edge_agent.inference.device_api import Device
from edge_agent.inference.service import service_of
from edge_agent.sources.run_sources import Maker, Running
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, MessageError
from fleet_core.board.device_settings import Personalize, settings_of
from fleet_core.board.source_settings import CommandSource
from fleet_core.data.live import Taken
from fleet_core.data.samples import Samples, save
from fleet_core.model import graph_bundle
from fleet_core.protocol.device_messages import Report
from tests.support.cli import typing
from tests.support.inprocess import World
from tests.support.task_fleets import NAMES, TaskFleet, check_comparison, home

pytestmark = pytest.mark.slow

LABELS = ("slow", "fast", "high")


def drawn(seed: int, count: int = 60, gain: float = 1.0) -> Samples:
    """16 readings, in which a slow wave, a fast wave and a high level each occur in half of the samples. gain: of the
    sensor."""
    rng = np.random.default_rng(seed)
    y, phase, steps = rng.random((count, 3)) < 0.5, rng.random((count, 2)), np.arange(16) / 16
    waves = [np.sin(2 * np.pi * (times * steps + phase[:, [k]])) for k, times in enumerate((1, 5))]
    x = gain * (y[:, [0]] * waves[0] + y[:, [1]] * waves[1]) + y[:, [2]] + 0.05 * rng.normal(size=(count, 16))
    return Samples(x[:, None].astype(np.float32), y.astype(np.float64), None, np.arange(count, dtype=np.float64),
                   outputs=LABELS)


SEVERAL = TaskFleet(
    'kind = "multi-label"\noutputs = ["slow", "fast", "high"]',
    lambda path, seed, gain: save(path, drawn(seed, gain=gain)), "local_steps = 20\nclient_lr = 0.3",
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> World:
    return SEVERAL.trained(tmp_path_factory.mktemp("fleet"), rounds=6)


# The fleet ------------------------------------------------------------------------------------------------------------


def test_the_fleet_learns_labels_and_the_ledger_has_counts_but_no_accuracy(fleet: World) -> None:
    ledger = fleet.server.ledger
    assert not ledger.rows(Evaluation)
    assert not ledger.rows(Alone)
    rows = ledger.rows(TaskEvaluation)
    assert {(row.device, row.stage) for row in rows} == {(n, s) for n in NAMES for s in ("before", "after")}
    assert all(row.outputs == LABELS and row.samples == 24 and row.task == "multi-label" for row in rows)
    found = result.task_score([row for row in rows if row.stage == "after"])
    assert found is not None
    assert found.samples == 48
    assert found.measures["micro_f1"]["all"] > 0.8
    assert set(found.measures["f1"]) == set(LABELS)


def test_results_have_f1_in_place_of_accuracies(fleet: World) -> None:
    data = outcome.of_fleet(fleet.fleet.folder)
    assert result.validate(json.loads(json.dumps(data))) == []
    assert "evaluated" not in data
    assert "verdict" not in data
    last = data["rounds"][-1]
    assert "accuracy" not in last
    rows = fleet.server.ledger.rows(TaskEvaluation, stage="after")
    both, met = (sum(sum(row.sums[name]) for row in rows for name in names)
                 for names in (("both",), ("answered", "true")))
    assert last["task"]["measures"]["micro_f1"]["all"] == pytest.approx(2 * both / met)
    exact = sum(row.sums["exact"][0] for row in rows) / 48
    assert last["task"]["measures"]["exact_match"]["all"] == pytest.approx(exact)


def test_a_fleet_is_compared_by_the_figure_of_its_task(fleet: World) -> None:
    check_comparison(fleet, "micro_f1", "after", "micro_f1 all")


def test_listings_and_the_report_show_f1(fleet: World) -> None:
    parsed = result.parse(outcome.of_fleet(fleet.fleet.folder))
    line = round_line(parsed.rounds[-1], 6)
    assert "micro-F1 0." in line or "micro-F1 1.000" in line
    assert "accuracy" not in line
    table = closing_table(parsed)
    assert "exact match" in table
    assert "; F1 slow " in table
    page = render(outcome.of_fleet(fleet.fleet.folder), title="t")
    assert '<th scope="col">exact match</th>' in page
    assert "micro-F1, all evaluated devices" in page
    assert "MAE" not in page
    now = snapshot(fleet.server.ledger)
    assert all(device.task is not None and device.task.head == "micro-F1" for device in now.devices)
    changes = [one.what for one in outcome.differences(parsed, parsed)]
    assert {"micro-F1, all devices", "F1 of slow, all devices"} <= set(changes)


def test_counts_that_no_samples_have_are_refused(fleet: World) -> None:
    good = fleet.agents["a"].evaluations[0]
    assert good.sums is not None
    for sums, samples in (({**good.sums, "both": (1.0,)}, 24), ({"both": (1.0, 1.0, 1.0)}, 24), (good.sums, 0),
                          ({**good.sums, "answered": (-1.0, 1.0, 1.0)}, 24), ({**good.sums, "exact": (25.0,)}, 24),
                          ({**good.sums, "true": (0.0, 0.0, 0.0)}, 24), (None, 24)):
        wrong = schema.read(type(good), {**schema.plain(good), "samples": samples, "sums": sums})[0]
        assert wrong is not None
        with pytest.raises(MessageError, match="sums"):
            fleet.server._device_messages.on_report("a", Report(6, evaluated_round=6, evaluations=(wrong,)))


def test_metrics_and_rows_have_f1(fleet: World) -> None:
    rows = metafleet.Fleet(fleet.fleet.folder).evaluations()
    assert {row["device"] for row in rows} == set(NAMES)
    assert all({"micro_f1.all", "macro_f1.all", "exact_match.all"} <= row.keys() and "accuracy" not in row
               for row in rows)
    page = metrics.text(figures_of(fleet.agents["a"]))
    assert 'metafleet_agent_label_f1_ratio{stage="after",output="slow"} ' in page


# A device -------------------------------------------------------------------------------------------------------------


def test_a_device_answers_with_labels_and_their_probabilities(fleet: World, capsys: pytest.CaptureFixture[str],
                                                              tmp_path: Path) -> None:
    later = drawn(50, 40)
    device = Device(home(fleet))
    answers = [device.predict(x) for x in later.x]
    right = np.mean([[name in one.labels for name in LABELS] == list(y > 0)
                     for one, y in zip(answers, later.y, strict=True)])
    assert right > 0.5
    limits = answers[0].thresholds
    assert set(limits) == set(LABELS)
    assert all(one.labels == tuple(n for n, p in one.probabilities.items() if p >= limits[n]) for one in answers)
    assert all(one.thresholds == limits for one in answers)
    assert all(one.label == "" and not one.values for one in answers)
    assert all(0.5 <= one.certainty <= 1 for one in answers)
    np.save(tmp_path / "x.npy", later.x)
    device_commands.predict(tmp_path / "x.npy", home(fleet), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["outputs"] == list(LABELS)
    assert [tuple(one) for one in shown["label_sets"]] == [one.labels for one in answers]
    assert shown["labels"] == []
    assert shown["thresholds"] == list(limits.values())
    device_commands.predict(tmp_path / "x.npy", home(fleet), as_json=False)
    out, told = capsys.readouterr()
    assert f"thresholds: slow {limits['slow']:g}, fast " in out + told
    lines = out.split("\n")
    assert lines[0].split() == ["sample", "labels", "probabilities"]
    assert "slow 0." in lines[1] or "slow 1." in lines[1]
    assert any(" none " in line for line in lines)


def test_samples_are_added_with_any_number_of_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = SEVERAL.trained(tmp_path)
    new = drawn(70, 5)
    np.save(tmp_path / "x.npy", new.x)
    device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, labels="slow,high")
    assert "5 samples with slow, high added, 5 added by now" in capsys.readouterr().out
    device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, labels="")
    assert "5 samples with none of the labels added, 10 added by now" in capsys.readouterr().out
    np.savez(tmp_path / "new.npz", x=new.x, y=new.y > 0, labels=np.array(LABELS))
    device_commands.add(tmp_path / "new.npz", None, home(fleet), new_class=False)
    assert "5 samples with their labels added, 15 added by now" in capsys.readouterr().out
    local = service_of(home(fleet), settings_of(home(fleet)))
    local.known_classes()
    every = local.local().every()
    assert every.y[-15].tolist() == [1, 0, 1]
    assert every.y[-10].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(every.y[-5:], new.y)
    device_commands.list_samples(home(fleet), as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in listed] == [*LABELS, "all samples"]
    assert listed[-1] == {"label": "all samples", "recorded": 36, "held_back": 24, "added": 15}
    assert listed[0]["added"] == 5 + int(new.y[:, 0].sum())
    device = Device(home(fleet))
    device.add(new.x[1], ["fast"])
    late = device.add(new.x[0])
    assert "slow" in likely(device.unlabelled()[0])
    assert set(device.unlabelled()[0].plain) == {"id", "time", "labels", "probabilities"}
    device.label(late, [])
    np.testing.assert_array_equal(local.local().every().y[-2:], [[0, 1, 0], [0, 0, 0]])
    with pytest.raises(ConfigError, match=r"unknown label 'quick'.*some of slow, fast, high, or none"):
        device.add(new.x[2], ["quick"])
    with pytest.raises(ConfigError, match="one class 'fast', and a sample of this fleet has any number of labels"):
        device.add(new.x[2], "fast")
    with pytest.raises(ConfigError, match=r"the labels are \[1.0\]; expected a list of names, empty for none"):
        device.add(new.x[2], [1.0])
    with pytest.raises(ConfigError, match="one class 'fast'"):
        device_commands.add(tmp_path / "x.npy", "fast", home(fleet), new_class=False)
    with pytest.raises(ConfigError, match="this fleet has labels, not numbers to predict"):
        device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, target="1,2,3")
    np.savez(tmp_path / "one.npz", x=new.x, y=np.arange(5) % 3)
    with pytest.raises(DataError, match=r"has one class for each sample; expected \[N, K\], 0 or 1 for each label"):
        device_commands.add(tmp_path / "one.npz", None, home(fleet), new_class=False)


def test_a_head_personalizes_and_what_needs_classes_is_refused(fleet: World,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    device = home(fleet, "b")
    device_commands.personalize(device, True, "head", 60, None)
    facts = json.loads(capsys.readouterr().out)
    assert facts["personalization"] == "head"
    assert facts["samples"] == 36
    assert facts["held_back"]["micro_f1"]["all"] > 0.8
    assert {"micro_f1", "f1"} <= set(facts["held_back"]["before"])
    service = service_of(device, settings_of(device))
    service.restore()
    assert service.personalization == "head"
    device_commands.personalize(device, False, "head", None, None)
    assert "micro-F1 on 24 held-back samples: 0." in capsys.readouterr().out
    for by in ("proto", "knn", "auto"):
        with pytest.raises(ConfigError, match=rf"cannot personalize by {by}: it compares classes.*head, adapt"):
            device_commands.personalize(device, True, by, None, None)


def test_a_worse_personalization_is_refused_by_the_f1(tmp_path: Path) -> None:
    fleet = SEVERAL.trained(tmp_path, rounds=6)
    service = fleet.agents["a"].service
    more = drawn(90, 60)
    relearn.personalize(service, Personalize("head"))
    with service.slots.writing():
        service.slots.set_choice(Personalize("head"))
    with pytest.raises(DataError, match=r"not kept, because with these samples: micro-F1 0\.\d+ on 24"):
        relearn.learn_targets(service, more.x, 1 - more.y)
    assert service.local().added() == 0
    good = relearn.learn_targets(service, more.x, more.y)
    assert (good["added"], good["personalization"]) == (60, "head")
    with pytest.raises(DataError, match="expected 0 or 1 for each label"):
        relearn.learn_targets(service, more.x, more.y * 2)


def test_a_device_without_torch_takes_the_gradient_steps_by_the_graph(tmp_path: Path) -> None:
    fleet = SEVERAL.trained(tmp_path)
    service = fleet.agents["a"].service
    untouched = service.stored.open(None, service.stored.served(service.slots.pointer().slot))
    plain = service._evaluator.held_back(untouched.predictor, service.local())
    done = relearn.personalize(service, Personalize("adapt", steps=200, rate=0.3))
    after = service.held_back()
    assert done.how == "sgd"
    assert plain is not None
    assert after is not None
    assert after.loss < plain.loss


def test_a_fleet_half_without_torch_ends_where_one_with_torch_ends(tmp_path: Path) -> None:
    SEVERAL.half_without_torch(tmp_path)


@pytest.mark.parametrize("method", ["pfldyn-maml", "per-fedavg-fo", "pfedme", "fedper", "scaffold"])
def test_methods_without_classes_serve_a_fleet_of_labels(tmp_path: Path, method: str) -> None:
    fleet = SEVERAL.trained(tmp_path, rounds=2, method=method)
    assert fleet.closed() == 2
    answer = Device(home(fleet)).predict(drawn(3, 1).x[0])
    assert list(answer.probabilities) == list(LABELS)


def test_the_bundle_holds_the_task(fleet: World) -> None:
    graph = graph_bundle.unpack(fleet.fleet.graph_bytes())
    assert graph.layout.task == fleet.fleet.config.model.task
    assert set(np.unique(graph.golden["y"])) == {0.0, 1.0}


def test_http_answers_with_probabilities_and_takes_samples_with_labels(fleet: World) -> None:
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    protocol = InferenceProtocol(ServedModel("t", service))

    def asked(path: str, **tensors: np.ndarray) -> Any:
        inputs = [{"name": name, "datatype": {"float32": "FP32", "uint8": "UINT8"}[str(a.dtype)],
                   "shape": list(a.shape), "data": a.ravel().tolist()} for name, a in tensors.items()]
        method, body = ("POST", json.dumps({"inputs": inputs}).encode()) if tensors else ("GET", b"")
        response = protocol.answer(Request(Head(method, f"/v2/models/t{path}", {}), body))
        return response.status, json.loads(response.body)

    status, about = asked("")
    assert status == 200
    assert about["outputs"] == [{"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]},
                                {"name": "answered", "datatype": "BOOL", "shape": [-1, 3]}]
    assert about["labels"] == list(LABELS)
    assert "classes" not in about
    later = drawn(60, 3)
    status, found = asked("/infer", x=later.x)
    values, answered = found["outputs"]
    assert (values["name"], values["datatype"], values["shape"]) == ("probabilities", "FP32", [3, 3])
    np.testing.assert_allclose(np.reshape(values["data"], (3, 3)), service.predict(later.x), atol=1e-5)
    assert (answered["name"], answered["datatype"], answered["shape"]) == ("answered", "BOOL", [3, 3])
    sets = service.answers(later.x).label_sets
    assert answered["data"] == [name in names for names in sets for name in LABELS]
    status, kept = asked("/samples", x=later.x, labels=later.y.astype(np.uint8))
    assert (status, kept["added"]) == (200, 3)
    np.testing.assert_array_equal(service.local().every().y[-3:], later.y)
    status, refused = asked("/samples", x=later.x)
    assert status == 400
    assert "'labels' is missing" in refused["error"]
    status, refused = asked("/samples", x=later.x, labels=2 * np.ones((3, 3), np.uint8))
    assert status == 400
    assert "0 or 1 for each label" in refused["error"]


def test_stored_samples_get_lists_of_labels_over_http_and_in_review(
    fleet: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, new = home(fleet, "b"), drawn(61, 5)
    device = Device(place)
    ids = [device.add(x, time=float(k)) for k, x in enumerate(new.x)]
    certain = [one.answer.certainty for one in device.unlabelled() if one.answer]
    assert certain == sorted(certain)
    service = service_of(place, settings_of(place))
    service.restore()
    protocol = InferenceProtocol(ServedModel("t", service))

    def labelled(**body: Any) -> tuple[int, Any]:
        response = protocol.answer(Request(Head("POST", "/v2/models/t/label", {}), json.dumps(body).encode()))
        return response.status, json.loads(response.body)

    for wrong in ({"label": "fast"}, {"labels": "fast"}, {"labels": [1]}):
        status, refused = labelled(id=ids[0], **wrong)
        assert status == 400
        assert "'labels' is " in refused["error"]
        assert "a list of some of slow, fast, high, or an empty one" in refused["error"]
    status, refused = labelled(id=ids[0], labels=["quick"])
    assert (status, "unknown label 'quick'" in refused["error"]) == (400, True)
    status, found = labelled(id=ids[0], labels=["slow", "high"])
    assert (status, found["labels"]) == (200, ["slow", "high"])
    review.review(place, 20, ids[1], None, labels="fast, high", new_class=False, as_json=False)
    assert f"{ids[1]} is fast, high;" in capsys.readouterr().out
    review.review(place, 20, ids[2], None, labels="", new_class=False, as_json=False)
    assert f"{ids[2]} is none of the labels;" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="belong together"):
        review.review(place, 20, ids[3], "fast", labels="fast", new_class=False, as_json=False)
    waiting = [one.id for one in device.unlabelled()]
    typing(monkeypatch, "quick", "slow,fast", "-")
    review.review(place, 20, None, None, new_class=False, as_json=False)
    out = capsys.readouterr().out
    assert "labels: slow, fast, high, as slow,fast, or - for none; Enter leaves" in out
    assert "unknown label 'quick'" in out
    assert (len(waiting), device.unlabelled()) == (2, [])
    np.testing.assert_array_equal(service.local().every().y[-5:],
                                  [[1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0]])
    sensor = CommandSource(kind="command", command=("true",), every_s=0.0)
    source = Running(sensor, "s", service, place, settings_of(place), print, lambda now: None)
    source.take(Maker(sensor, settings_of(place), service.layout.sample), [Taken(new.x[0], 9.0, "slow,high"),
                                                                           Taken(new.x[1], 10.0, "")])
    assert source.label("-") == "the last sample of s is -"
    np.testing.assert_array_equal(service.local().every().y[-2:], [[1, 0, 1], [0, 0, 0]])


def test_two_agents_learn_over_the_embedded_broker(tmp_path: Path) -> None:
    with SEVERAL.live(tmp_path, 3) as made:
        found = outcome.of_fleet(made.folder)
        for stage in ("before", "after"):
            assert found["task"][stage]["measures"]["micro_f1"]["all"] > 0.8  # 0.67 by answering every label
        assert found["rounds"][-1]["task"]["samples"] == 48
