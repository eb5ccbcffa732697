"""A fleet that detects anomalies: two agents learn from quiet samples without labels, answer and report alarms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metafleet
from cloud_server.devices import fleet_status
from cloud_server.ledger.ledger_tables import Alone, Evaluation, TaskEvaluation
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import closing_table, round_line, snapshot
from cloud_server.results import outcome, result
from edge_agent.commands import device_commands, review
from edge_agent.commands.run import figures_of
from edge_agent.connection.alarm_senders import hearing_alarms
from edge_agent.http import metrics
from edge_agent.http.http_messages import Head, Request
from edge_agent.http.inference_protocol import InferenceProtocol
from edge_agent.http.serve import ServedModel
from edge_agent.inference import relearn
from edge_agent.inference.device_api import Device
from edge_agent.inference.service import service_of
from edge_agent.sources.run_sources import Sources
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, MessageError
from fleet_core.board.device_settings import Personalize, settings_of
from fleet_core.model import graph_bundle
from fleet_core.protocol.device_messages import Report
from tests.support import waiting
from tests.support.cli import typing
from tests.support.inprocess import World
from tests.support.task_fleets import NAMES, TaskFleet, check_comparison, home

pytestmark = pytest.mark.slow

SPIKE = 4.0


def drawn(seed: int, count: int, gain: float = 1.0, spikes: bool = False) -> np.ndarray[Any, Any]:
    """A sine of 16 readings. gain: of the sensor. spikes: one reading of each sample stands out."""
    rng = np.random.default_rng(seed)
    phase = rng.random((count, 1))
    x = gain * np.sin(2 * np.pi * (2 * np.arange(16) / 16 + phase)) + 0.05 * rng.normal(size=(count, 16))
    if spikes:
        x[np.arange(count), rng.integers(0, 16, count)] += SPIKE
    return x[:, None].astype(np.float32)


def write_quiet(path: Path, seed: int, gain: float) -> None:
    np.savez(path, x=drawn(seed, 100, gain), time=np.arange(100.0))


QUIET = TaskFleet(
    'kind = "anomaly"\nwidth = 16\nnormal = ["N"]\nshare = 0.05', write_quiet, "local_steps = 40\nclient_lr = 1.0",
    'hidden = [16, 4, 16], activation = "elu"', "fedavg", 4,
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> World:
    return QUIET.trained(tmp_path_factory.mktemp("fleet"))


def mixed(folder: Path) -> Path:
    """A file with four quiet samples, then four with a spike."""
    np.save(folder / "x.npy", np.concatenate([drawn(50, 4), drawn(51, 4, spikes=True)]))
    return folder / "x.npy"


# The fleet ------------------------------------------------------------------------------------------------------------


def test_the_ledger_has_alarms_and_no_accuracy(fleet: World) -> None:
    ledger = fleet.server.ledger
    assert not ledger.rows(Evaluation)
    assert not ledger.rows(Alone)
    rows = ledger.rows(TaskEvaluation)
    assert {(row.device, row.stage) for row in rows} == {(name, "before") for name in NAMES}
    assert all((row.outputs, row.samples, row.task) == (("score",), 20, "anomaly") for row in rows)
    found = result.task_score(rows)
    assert found is not None
    assert found.measures["alarms"]["quiet"] < 0.3
    assert "auroc" not in found.measures


def test_a_fleet_is_compared_by_the_figure_of_its_task(fleet: World) -> None:
    check_comparison(fleet, "difference", "before", "alarms quiet")


def test_results_and_listings_show_false_alarms(fleet: World) -> None:
    data = outcome.of_fleet(fleet.fleet.folder)
    assert result.validate(json.loads(json.dumps(data))) == []
    assert data["rounds"][-1]["task"]["measures"].keys() == {"alarms", "score"}
    parsed = result.parse(data)
    assert "false alarms " in round_line(parsed.rounds[-1], 4)
    assert "all, pooled" in closing_table(parsed)
    assert "false alarms" in render(data, title="t")
    now = snapshot(fleet.server.ledger)
    assert all(device.task is not None and device.accuracy is None for device in now.devices)
    rows = metafleet.Fleet(fleet.fleet.folder).evaluations()
    assert all({"alarms.quiet", "score.quiet"} <= row.keys() for row in rows)
    page = metrics.text(figures_of(fleet.agents["a"]))
    assert 'metafleet_agent_alarms_ratio{stage="before",output="quiet"} ' in page


def test_sums_that_no_samples_have_are_refused(fleet: World) -> None:
    good = fleet.agents["a"].evaluations[0]
    assert good.sums is not None
    for sums, samples in (({**good.sums, "quiet": (20.0, 21.0, 1.0, 1.0)}, 20), ({"quiet": (1.0,)}, 20),
                          (good.sums, 19), (None, 20)):
        wrong = schema.read(type(good), {**schema.plain(good), "samples": samples, "sums": sums})[0]
        assert wrong is not None
        with pytest.raises(MessageError, match="sums"):
            fleet.server._device_messages.on_report("a", Report(4, evaluated_round=4, evaluations=(wrong,)))


def test_a_fleet_half_without_torch_ends_where_one_with_torch_ends(tmp_path: Path) -> None:
    QUIET.half_without_torch(tmp_path, rounds=2)


@pytest.mark.parametrize("method", ["fedavg-meta", "pfldyn-maml", "per-fedavg-fo", "pfedme", "fedper", "scaffold"])
def test_methods_without_classes_serve_a_fleet_that_detects_anomalies(tmp_path: Path, method: str) -> None:
    fleet = QUIET.trained(tmp_path, rounds=2, method=method, hyper="client_lr = 0.01" if method == "pfedme" else "")
    assert fleet.closed() == 2
    assert Device(home(fleet)).predict(drawn(3, 1)[0]).alarm is not None


# A device -------------------------------------------------------------------------------------------------------------


def test_a_device_tells_spikes_from_quiet_samples(fleet: World, capsys: pytest.CaptureFixture[str],
                                                  tmp_path: Path) -> None:
    device_commands.predict(mixed(tmp_path), home(fleet), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    scores = [row[0] for row in shown["values"]]
    assert shown["alarms"][4:] == [True] * 4
    assert shown["alarms"] == [score > shown["threshold"] for score in scores]
    assert max(scores[:4]) < min(scores[4:])
    device_commands.predict(tmp_path / "x.npy", home(fleet), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["sample", "score", "threshold", "alarm"]
    assert all(line.split()[-1] == "ALARM" for line in lines[-4:])
    answer = Device(home(fleet)).predict(drawn(52, 1, spikes=True)[0])
    assert answer.alarm is True
    assert answer.threshold == pytest.approx(shown["threshold"])
    assert answer.values["score"] > shown["threshold"]


def test_each_device_has_a_threshold_of_its_own(fleet: World) -> None:
    limits = [Device(home(fleet, name)).predict(drawn(1, 1)[0]).threshold for name in NAMES]
    assert limits[0] != limits[1]


def test_http_answers_with_score_and_alarm(tmp_path: Path) -> None:
    fleet = QUIET.trained(tmp_path)
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    protocol = InferenceProtocol(ServedModel("t", service))

    def asked(path: str, x: np.ndarray[Any, Any] | None = None, label: str = "") -> Any:
        inputs = [] if x is None else [{"name": "x", "datatype": "FP32", "shape": list(x.shape),
                                        "data": x.ravel().tolist()}]
        inputs += [{"name": "label", "datatype": "BYTES", "shape": [1], "data": [label]}] if label else []
        method, body = ("POST", json.dumps({"inputs": inputs}).encode()) if inputs else ("GET", b"")
        response = protocol.answer(Request(Head(method, f"/v2/models/t{path}", {}), body))
        return response.status, json.loads(response.body)

    _, about = asked("")
    assert [(one["name"], one["datatype"], one["shape"]) for one in about["outputs"]] == [
        ("score", "FP32", [-1]), ("alarm", "BOOL", [-1])]
    status, found = asked("/infer", drawn(51, 3, spikes=True))
    assert status == 200
    score, alarm = found["outputs"]
    assert alarm["data"] == [True] * 3
    assert min(score["data"]) > found["parameters"]["threshold"]
    assert asked("/samples", drawn(60, 1), "quiet")[1]["added"] == 1
    status, refused = asked("/samples", drawn(60, 1), "N")
    assert status == 400
    assert "expected quiet or anomaly" in refused["error"]


def test_samples_of_sources_and_questions_raise_the_alarm_that_a_command_hears(tmp_path: Path) -> None:
    fleet = QUIET.trained(tmp_path)
    place = home(fleet)
    with (place / "device.toml").open("a") as file:
        file.write('[alarm]\ncommand = ["sh", "-c", "cat >> heard"]\nevery_s = 0\n'
                   '[[source]]\nkind = "folder"\npath = "incoming"\n')
    (place / "incoming").mkdir()
    np.save(place / "incoming" / "x.npy", np.concatenate([drawn(50, 2), drawn(51, 1, spikes=True)]))
    settings, log = settings_of(place), list[str]()
    service = service_of(place, settings)
    sources = Sources(place, settings, service, log.append)
    with hearing_alarms(place, settings, service, log.append), sources.on():
        waiting.until(lambda: any("no alarm" in line for line in log))
    assert not (place / "heard").exists(), "no model answers yet"
    (place / "sources-folder.taken").unlink()
    service.restore()
    with hearing_alarms(place, settings, service, log.append):
        with Sources(place, settings, service, log.append).on():
            waiting.until(lambda: (place / "heard").exists() and (place / "heard").read_text().endswith("}"))
        told = json.loads((place / "heard").read_text())
        (place / "heard").unlink()
        service.answers(drawn(52, 2, spikes=True))
    again = json.loads((place / "heard").read_text())
    assert told["sample"] in {one.id for one in Device(place).unlabelled()}
    assert told["score"] > told["threshold"] == again["threshold"]
    assert (told["alarms"], again["alarms"], again["sample"]) == (1, 2, None)
    assert len(log) == len([line for line in log if "no alarm" in line or "has ended" in line]), log


def test_stored_samples_are_reviewed_from_the_highest_score_on(
    fleet: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = home(fleet, "b")
    device = Device(place)
    for x in np.concatenate([drawn(90, 2), drawn(91, 1, spikes=True), drawn(92, 2)]):
        device.add(x)
    listed = [one.plain for one in device.unlabelled()]
    scores = [one["values"]["score"] for one in listed]
    assert scores == sorted(scores, reverse=True)
    assert [one["alarm"] for one in listed] == [score > one["threshold"] for one, score in zip(listed, scores,
                                                                                               strict=True)]
    typing(monkeypatch, "noise", "anomaly", "quiet", "", "", "")
    review.review(place, 20, None, None, new_class=False, as_json=False)
    out = capsys.readouterr().out
    assert "class: quiet, anomaly; Enter" in out
    assert f"score {scores[0]:.6g}, threshold {listed[0]['threshold']:.6g}, ALARM" in out
    assert "expected quiet or anomaly" in out
    assert [one.id for one in device.unlabelled()] == [one["id"] for one in listed[2:]]
    review.review(place, 20, listed[2]["id"], "anomaly", new_class=False, as_json=False)
    service = service_of(place, settings_of(place))
    service.restore()
    answer = ServedModel("t", service).label(listed[3]["id"], "quiet", new=False)
    assert answer["label"] == "quiet"
    assert [row[3] for row in service.local().counts()] == [2, 2]


def test_samples_are_added_as_quiet_or_as_anomalies_which_are_not_learned_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = QUIET.trained(tmp_path)
    np.save(tmp_path / "x.npy", drawn(70, 5))
    device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False)
    assert "5 samples of quiet added, 5 added by now" in capsys.readouterr().out
    np.save(tmp_path / "spikes.npy", drawn(71, 3, spikes=True))
    device_commands.add(tmp_path / "spikes.npy", "anomaly", home(fleet), new_class=False)
    capsys.readouterr()
    device_commands.list_samples(home(fleet), as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"class": "quiet", "recorded": 60, "held_back": 40, "added": 5},
        {"class": "anomaly", "recorded": 0, "held_back": 0, "added": 3},
    ]
    local = service_of(home(fleet), settings_of(home(fleet)))
    local.known_classes()
    assert len(local.local().every()) == 65
    device_commands.drop(home(fleet), 4)
    assert local.local().added() == 4
    with pytest.raises(ConfigError, match="this fleet detects anomalies; expected quiet or anomaly"):
        device_commands.add(tmp_path / "x.npy", "N", home(fleet), new_class=False)
    for wrong in ({"target": "1.5"}, {"labels": "N"}):
        with pytest.raises(ConfigError, match="neither numbers to predict nor several labels"):
            device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, **wrong)
    with pytest.raises(ConfigError, match="a number, and this fleet detects anomalies"):
        Device(home(fleet)).add(drawn(1, 1)[0], 1.5)
    Device(home(fleet)).add(drawn(1, 1)[0], "quiet")


def test_labelled_anomalies_give_auroc(tmp_path: Path) -> None:
    fleet = QUIET.trained(tmp_path)
    x = np.concatenate([drawn(0, 90), drawn(5, 10, spikes=True)])
    np.savez(home(fleet) / "samples.npz", x=x, y=np.array(["N"] * 90 + ["spike"] * 10), time=np.arange(100.0))
    found = fleet.agents["a"].service.held_back()
    assert found is not None
    assert found.figures["auroc"]["all"] > 0.95
    assert found.figures["alarms"]["anomaly"] > 0.5
    assert found.text.endswith(f"AUROC {found.figures['auroc']['all']:.3f}")


def test_without_quiet_samples_nothing_is_learned_and_without_held_back_ones_there_is_no_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = QUIET.trained(tmp_path)
    path = home(fleet) / "samples.npz"
    np.savez(path, x=drawn(0, 10), y=np.array(["A"] * 10))
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    with pytest.raises(DataError, match="there are no quiet samples to learn from"):
        service.local().own()
    path.unlink()
    device_commands.predict(mixed(tmp_path), home(fleet), as_json=False)
    shown = capsys.readouterr()
    assert shown.out.split("\n")[0].split() == ["sample", "score"]
    assert "no quiet sample is held back" in shown.err


def test_a_ridge_head_personalizes_and_what_compares_classes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = QUIET.trained(tmp_path)
    device_commands.personalize(home(fleet), True, "head", None, None)
    facts = json.loads(capsys.readouterr().out)
    assert (facts["personalization"], facts["samples"]) == ("head", 60)
    assert facts["held_back"]["score"]["quiet"] < facts["held_back"]["before"]["score"]["quiet"]
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    assert service.personalization == "head"
    assert service.answers(drawn(8, 2, spikes=True)).alarms == (True, True)
    for by in ("proto", "knn", "auto"):
        with pytest.raises(ConfigError, match=rf"cannot personalize by {by}: it compares classes"):
            device_commands.personalize(home(fleet), True, by, None, None)


def test_a_device_without_torch_takes_the_gradient_steps_by_the_graph(tmp_path: Path) -> None:
    fleet = QUIET.trained(tmp_path, method="fedavg-meta")
    device_commands.personalize(home(fleet), True, "adapt", 20, 0.5)
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    assert service.personalization == "sgd"
    assert service.answers(drawn(8, 2, spikes=True)).alarms == (True, True)


def test_a_device_notices_that_its_inputs_have_moved_and_reports_it(tmp_path: Path) -> None:
    fleet = QUIET.trained(tmp_path, method="fedavg-meta")
    agent = fleet.agents["a"]
    assert agent.service.personalization == "sgd"
    agent.service.answers(drawn(30, 100))
    assert agent.service.drift.moved_at == 0
    agent.service.answers(drawn(31, 60, 3.0))
    moved = agent.service.drift.moved_at
    assert 100 < moved <= 160
    assert fleet.pump(lambda: fleet_status.facts(fleet.fleet, fleet.server.ledger).get("moved") == ["a"])
    with (home(fleet) / "device.toml").open("a") as file:
        file.write("[serve]\nworse_by = 1.0\n")
    again = service_of(home(fleet), settings_of(home(fleet)))
    again.restore()
    assert again.drift.moved_at == moved
    relearn.personalize(again, Personalize(by="head"))
    assert again.drift.moved_at == moved, "the samples are the same, and answers have moved away from them"
    again.local().add(drawn(32, 60, 1.3), ["quiet"] * 60)
    relearn.personalize(again, Personalize(by="head"))
    assert again.drift.moved_at == 0
    again.answers(drawn(33, 60, 9.0))
    assert 0 < again.drift.moved_at <= 60
    relearn.personalize(again, Personalize(by="none"))
    again.answers(drawn(31, 60, 3.0))
    assert again.drift.moved_at == 0, "a model that is not personalized has nothing to compare with"


def test_the_bundle_holds_the_task(fleet: World) -> None:
    graph = graph_bundle.unpack(fleet.fleet.graph_bytes())
    assert graph.layout.task == fleet.fleet.config.model.task
    assert graph.golden["predict"].shape[1] == 16


def test_two_agents_raise_alarms_after_learning_over_the_embedded_broker(tmp_path: Path) -> None:
    with QUIET.live(tmp_path, 3) as made:
        assert outcome.of_fleet(made.folder)["rounds"][-1]["task"]["samples"] == 40
        for number in range(2):
            answering = Device(tmp_path / f"d{number}")
            assert all(answering.predict(x).alarm for x in drawn(80, 5, 1 + number / 5, spikes=True))
            assert not all(answering.predict(x).alarm for x in drawn(81, 5, 1 + number / 5))
