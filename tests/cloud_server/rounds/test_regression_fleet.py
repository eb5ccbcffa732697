"""A fleet that predicts numbers: two agents train, personalize, answer and report errors in place of accuracies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import metafleet
from cloud_server.ledger.ledger_tables import Alone, Evaluation, TaskEvaluation, Update
from cloud_server.records import training_graph
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import closing_table, round_line, snapshot
from cloud_server.results import outcome, result
from edge_agent.commands import device_commands, review
from edge_agent.commands.run import figures_of
from edge_agent.device.state import DeviceState
from edge_agent.http import metrics
from edge_agent.http.http_messages import Head, Request
from edge_agent.http.inference_protocol import InferenceProtocol
from edge_agent.http.serve import ServedModel
from edge_agent.inference import relearn
from edge_agent.inference.device_api import Device
from edge_agent.inference.service import service_of
from edge_agent.inference.worse_model_check import WorseModel
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, DataError, MessageError, StateError
from fleet_core.board.device_settings import Personalize, settings_of
from fleet_core.data.samples import Samples, save
from fleet_core.model import graph_bundle
from fleet_core.model.train_graph import pack
from fleet_core.protocol.device_messages import Report
from fleet_core.training.graph_engine import GraphSteps
from tests.support.cli import typing
from tests.support.inprocess import World
from tests.support.task_fleets import NAMES, TaskFleet, check_comparison, home
from tests.support.train_graphs import train_graph

pytestmark = pytest.mark.slow

OUTPUTS = ("speed", "load")


def drawn(seed: int, count: int = 60, gain: float = 1.0) -> Samples:
    """A wave of 16 readings on a level; speed follows from its amplitude, load is its level. gain: of the sensor."""
    rng = np.random.default_rng(seed)
    amplitude, level, phase = rng.uniform(0.5, 4, count), rng.uniform(-1, 1, count), rng.random((count, 1))
    wave = np.sin(2 * np.pi * (2 * np.arange(16) / 16 + phase))
    x = gain * amplitude[:, None] * wave + level[:, None] + 0.02 * rng.normal(size=(count, 16))
    y = np.stack([100 + 10 * amplitude, level], 1)
    return Samples(x[:, None].astype(np.float32), y, None, np.arange(count, dtype=np.float64), outputs=OUTPUTS)


NUMBERS = TaskFleet(
    '''\
kind = "regression"
outputs = ["speed", "load"]
mean = [122.0, 0.0]
deviation = [10.0, 0.6]
loss = "huber"''',
    lambda path, seed, gain: save(path, drawn(seed, gain=gain)), "local_steps = 20\nclient_lr = 0.1",
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> World:
    return NUMBERS.trained(tmp_path_factory.mktemp("fleet"), rounds=6)


# The fleet ------------------------------------------------------------------------------------------------------------


def test_the_fleet_learns_numbers_and_the_ledger_has_errors_but_no_accuracy(fleet: World) -> None:
    ledger = fleet.server.ledger
    assert not ledger.rows(Evaluation)
    assert not ledger.rows(Alone)
    rows = ledger.rows(TaskEvaluation)
    assert {(row.device, row.stage) for row in rows} == {(n, s) for n in NAMES for s in ("before", "after")}
    assert all(row.outputs == OUTPUTS and row.samples == 24 and row.task == "regression" for row in rows)
    found = result.task_score([row for row in rows if row.stage == "after"])
    assert found is not None
    assert found.samples == 48
    assert found.measures["r2"]["speed"] > 0.5
    assert found.measures["r2"]["load"] > 0.5


def test_results_have_the_tasks_measures_in_place_of_accuracies(fleet: World) -> None:
    data = outcome.of_fleet(fleet.fleet.folder)
    assert result.validate(json.loads(json.dumps(data))) == []
    assert "evaluated" not in data
    assert "verdict" not in data
    assert set(data["task"]) == {"before", "after"}
    assert set(data["task"]["after"]["measures"]["mae"]) == set(OUTPUTS)
    last = data["rounds"][-1]
    assert "accuracy" not in last
    assert last["task"]["samples"] == 48
    by_hand = fleet.server.ledger.rows(TaskEvaluation, stage="after")
    mae = sum(row.sums["absolute"][0] for row in by_hand) / 48
    assert last["task"]["measures"]["mae"]["speed"] == pytest.approx(mae)


def test_a_fleet_is_compared_by_the_figure_of_its_task(fleet: World) -> None:
    check_comparison(fleet, "error", "after", "mae speed")


def test_listings_and_the_report_show_errors(fleet: World) -> None:
    parsed = result.parse(outcome.of_fleet(fleet.fleet.folder))
    line = round_line(parsed.rounds[-1], 6)
    assert "MAE speed " in line
    assert "accuracy" not in line
    table = closing_table(parsed)
    assert "all, pooled" in table
    assert "R² speed 0." in table
    page = render(outcome.of_fleet(fleet.fleet.folder), title="t")
    assert "<th scope=\"col\">MAE</th>" in page
    assert "No round of this run was evaluated" not in page
    now = snapshot(fleet.server.ledger)
    assert all(device.task is not None and device.accuracy is None for device in now.devices)


def test_evaluations_of_another_shape_are_refused(fleet: World) -> None:
    good = fleet.agents["a"].evaluations[0]
    assert good.sums is not None
    for sums, samples in (({**good.sums, "absolute": (1.0,)}, 24), ({"absolute": (1.0, 1.0)}, 24), (good.sums, 0),
                          ({**good.sums, "squared": (-1.0, 1.0)}, 24), (None, 24)):
        wrong = schema.read(type(good), {**schema.plain(good), "samples": samples, "sums": sums})[0]
        assert wrong is not None
        with pytest.raises(MessageError, match="sums"):
            fleet.server._device_messages.on_report("a", Report(6, evaluated_round=6, evaluations=(wrong,)))


# Without torch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg-meta", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("per-fedavg-exact", "per-fedavg-hf", "fedper"))])
def test_a_fleet_half_without_torch_ends_where_one_with_torch_ends(tmp_path: Path, method: str) -> None:
    torch, mixed = NUMBERS.half_without_torch(tmp_path, method=method)
    for one, other in zip(torch.server.ledger.rows(TaskEvaluation), mixed.server.ledger.rows(TaskEvaluation),
                          strict=True):
        assert other.sums["absolute"] == pytest.approx(one.sums["absolute"], rel=1e-4)


def test_a_step_of_numbers_that_is_not_finite_commits_nothing_and_the_next_round_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = NUMBERS.made(tmp_path)
    for number, name in enumerate(NAMES):
        made.start_agent(name, drawn(number), engine="onnx")
    mean, calls = GraphSteps._mean, [0]

    def failing(self: GraphSteps, *given: Any) -> Any:
        calls[0] += 1
        found = mean(self, *given)
        return {**found, "loss": np.float32("nan")} if calls[0] == 2 else found

    monkeypatch.setattr(GraphSteps, "_mean", failing)
    made.start_server()
    assert made.pump(lambda: made.logged("the loss is nan at step")), made.lines[-10:]
    failed = next(line for line in made.lines if "the loss is nan at step" in line).partition(":")[0]
    folder = DeviceState(made.folder / "devices" / failed).folder
    assert not list(folder.rglob("pending*")) + list(folder.rglob("state.safetensors"))
    made.clock.seconds += 10_000
    assert made.pump(lambda: made.closed() == 2, tick_s=5), made.lines[-10:]
    assert made.server.ledger.rows(Update, status="counted")


def test_a_graph_of_classes_in_a_fleet_of_numbers_is_refused_when_the_server_starts(tmp_path: Path) -> None:
    made = NUMBERS.made(tmp_path)
    storage.write_atomic(training_graph.path_of(made.fleet), pack(train_graph("fedavg")))
    with pytest.raises(StateError, match="is for the layout"):
        made.start_server()


# A device -------------------------------------------------------------------------------------------------------------


def test_a_device_answers_with_numbers_in_the_users_unit(fleet: World, capsys: pytest.CaptureFixture[str],
                                                         tmp_path: Path) -> None:
    later = drawn(50, 30)
    answer = Device(home(fleet)).predict(later.x[0])
    assert list(answer.values) == list(OUTPUTS)
    assert (answer.label, answer.probabilities) == ("", {})
    np.save(tmp_path / "x.npy", later.x)
    device_commands.predict(tmp_path / "x.npy", home(fleet), as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["outputs"] == list(OUTPUTS)
    assert shown["labels"] == []
    assert shown["values"][0] == pytest.approx(list(answer.values.values()))
    assert np.abs(np.array(shown["values"])[:, 0] - later.y[:, 0]).mean() < np.abs(later.y[:, 0] - 122).mean()
    device_commands.predict(tmp_path / "x.npy", home(fleet), as_json=False)
    assert capsys.readouterr().out.split("\n")[0].split() == ["sample", "speed", "load"]


def test_samples_are_added_with_targets_and_a_class_is_refused(tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    fleet = NUMBERS.trained(tmp_path)
    new = drawn(70, 5)
    np.save(tmp_path / "x.npy", new.x)
    device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, target="120.5,0.25")
    assert "5 samples with speed, load added, 5 added by now" in capsys.readouterr().out
    np.savez(tmp_path / "new.npz", x=new.x, y=new.y, outputs=np.array(OUTPUTS))
    device_commands.add(tmp_path / "new.npz", None, home(fleet), new_class=False)
    capsys.readouterr()
    local = service_of(home(fleet), settings_of(home(fleet)))
    local.known_classes()
    every = local.local().every()
    assert every.y[-10].tolist() == [120.5, 0.25]
    np.testing.assert_array_equal(every.y[-5:], new.y)
    device_commands.list_samples(home(fleet), as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"recorded": 36, "held_back": 24, "added": 10}]
    device_commands.drop(home(fleet), 5)
    assert local.local().added() == 5
    device = Device(home(fleet))
    late = device.add(new.x[0])
    device.label(late, [118.0, 0.5])
    device.add(new.x[1], (119.0, 0.25))
    np.testing.assert_array_equal(local.local().every().y[-2:], [[118.0, 0.5], [119.0, 0.25]])
    for wrong in (1.0, [1.0, float("nan")]):
        with pytest.raises(ConfigError, match=r"the targets are .*; expected a finite number for each of speed, load"):
            device.add(new.x[2], wrong)
    with pytest.raises(ConfigError, match=r"the targets are \[1.0\]; expected a finite number for each of speed, load"):
        device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, target="1")
    with pytest.raises(ConfigError, match="--target: 'fast' is not numbers"):
        device_commands.add(tmp_path / "x.npy", None, home(fleet), new_class=False, target="fast")
    with pytest.raises(ConfigError, match="a class 'fast', and this fleet predicts speed, load"):
        device_commands.add(tmp_path / "x.npy", "fast", home(fleet), new_class=False)
    with pytest.raises(ConfigError, match="a class 'fast'"):
        Device(home(fleet)).add(new.x[0], "fast")


def test_a_ridge_head_personalizes_and_what_needs_classes_is_refused(
    fleet: World, capsys: pytest.CaptureFixture[str]
) -> None:
    device = home(fleet, "b")
    device_commands.personalize(device, True, "head", None, None)
    facts = json.loads(capsys.readouterr().out)
    assert facts["personalization"] == "head"
    assert facts["samples"] == 36
    assert facts["held_back"]["r2"]["speed"] > 0.5
    assert set(facts["held_back"]["before"]) == {"mae", "r2"}
    service = service_of(device, settings_of(device))
    service.restore()
    assert service.personalization == "head"
    device_commands.personalize(device, False, "head", None, None)
    assert "MAE on 24 held-back samples: speed " in capsys.readouterr().out
    with pytest.raises(WorseModel, match=r"the former model answers: MAE speed [\d.]+, load [\d.]+ on 24 held-back"):
        device_commands.personalize(device, True, "none", None, None)
    for by in ("proto", "knn", "auto"):
        with pytest.raises(ConfigError, match=rf"cannot personalize by {by}: it compares classes.*head, adapt"):
            device_commands.personalize(device, True, by, None, None)


def test_a_worse_personalization_is_refused_by_the_error(tmp_path: Path) -> None:
    fleet = NUMBERS.trained(tmp_path, rounds=6)
    service = fleet.agents["a"].service
    wrong = drawn(90, 60)
    relearn.personalize(service, Personalize("head"))
    with service.slots.writing():
        service.slots.set_choice(Personalize("head"))
    with pytest.raises(DataError, match=r"not kept, because with these samples: MAE speed [\d.]+, load [\d.]+ on 24"):
        relearn.learn_targets(service, wrong.x, wrong.y + np.array([300.0, 20.0]))
    assert service.local().added() == 0
    good = relearn.learn_targets(service, wrong.x, wrong.y)
    assert (good["added"], good["personalization"]) == (60, "head")


def test_a_device_without_torch_takes_the_gradient_steps_by_the_graph(tmp_path: Path) -> None:
    fleet = NUMBERS.trained(tmp_path, rounds=6)
    service = fleet.agents["a"].service
    before = service.held_back()
    done = relearn.personalize(service, Personalize("adapt", steps=50, rate=0.05))
    after = service.held_back()
    assert done.how == "sgd"
    assert before is not None
    assert after is not None
    untouched = service.stored.open(None, service.stored.served(service.slots.pointer().slot))
    plain = service._evaluator.held_back(untouched.predictor, service.local())
    assert plain is not None
    assert after.loss < plain.loss


@pytest.mark.parametrize("method", ["pfldyn-maml", "per-fedavg-fo", "pfedme", "fedper", "scaffold"])
def test_methods_without_classes_serve_a_fleet_of_numbers(tmp_path: Path, method: str) -> None:
    fleet = NUMBERS.trained(tmp_path, rounds=2, method=method)
    assert fleet.closed() == 2
    answer = Device(home(fleet)).predict(drawn(3, 1).x[0])
    assert all(np.isfinite(list(answer.values.values())))


def test_the_bundle_holds_the_task(fleet: World) -> None:
    graph = graph_bundle.unpack(fleet.fleet.graph_bytes())
    assert graph.layout.task == fleet.fleet.config.model.task
    assert graph.golden["y"].dtype == np.float32


def test_http_answers_with_values_and_takes_samples_with_targets(fleet: World) -> None:
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    protocol = InferenceProtocol(ServedModel("t", service))

    def asked(path: str, **tensors: np.ndarray) -> Any:
        inputs = [{"name": name, "datatype": "FP32", "shape": list(a.shape), "data": a.ravel().tolist()}
                  for name, a in tensors.items()]
        method, body = ("POST", json.dumps({"inputs": inputs}).encode()) if tensors else ("GET", b"")
        response = protocol.answer(Request(Head(method, f"/v2/models/t{path}", {}), body))
        return response.status, json.loads(response.body)

    status, about = asked("")
    assert status == 200
    assert about["outputs"] == [{"name": "values", "datatype": "FP32", "shape": [-1, 2]}]
    assert about["values"] == list(OUTPUTS)
    assert "classes" not in about
    later = drawn(60, 3)
    status, found = asked("/infer", x=later.x)
    (values,) = found["outputs"]
    assert (values["name"], values["datatype"], values["shape"]) == ("values", "FP32", [3, 2])
    np.testing.assert_allclose(np.reshape(values["data"], (3, 2)), service.predict(later.x), rtol=1e-5)
    status, kept = asked("/samples", x=later.x, target=later.y.astype(np.float32))
    assert (status, kept["added"]) == (200, 3)
    np.testing.assert_allclose(service.local().every().y[-3:], later.y, rtol=1e-6)
    status, refused = asked("/samples", x=later.x)
    assert status == 400
    assert "'target' is missing" in refused["error"]


def test_stored_samples_get_their_targets_over_http_and_in_review(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = NUMBERS.trained(tmp_path)
    device, new = Device(home(fleet)), drawn(61, 4)
    first, second, third, last = (device.add(x, time=float(k)) for k, x in enumerate(new.x))
    service = service_of(home(fleet), settings_of(home(fleet)))
    service.restore()
    protocol = InferenceProtocol(ServedModel("t", service))

    def labelled(**body: Any) -> tuple[int, Any]:
        response = protocol.answer(Request(Head("POST", "/v2/models/t/label", {}), json.dumps(body).encode()))
        return response.status, json.loads(response.body)

    for wrong in ({"label": "fast"}, {"target": [1.0]}, {"target": ["a", "b"]}, {"target": 3}):
        status, refused = labelled(id=first, **wrong)
        assert status == 400
        assert "'target' is " in refused["error"]
        assert "a number for each of speed, load" in refused["error"]
    status, found = labelled(id=first, target=[118, 0.5])
    assert (status, found["target"]) == (200, [118, 0.5])
    review.review(home(fleet), 20, second, None, target="119,0.25", new_class=False, as_json=False)
    assert f"{second} is 119,0.25" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a class 'fast', and this fleet predicts speed, load"):
        review.review(home(fleet), 20, third, "fast", new_class=False, as_json=False)
    typing(monkeypatch, "fast", "1", "120.5,-0.25", "")
    review.review(home(fleet), 20, None, None, new_class=False, as_json=False)
    out = capsys.readouterr().out
    assert "targets: speed, load" in out
    assert "'fast' is not numbers" in out
    assert "expected a finite number for each of speed, load" in out
    assert "1 labelled" in out
    assert [one.id for one in device.unlabelled()] == [third]
    np.testing.assert_array_equal(service.local().every().y[-3:], [[118, 0.5], [119, 0.25], [120.5, -0.25]])
    assert last not in device._buffer.ids()


def test_metrics_and_rows_have_the_errors(fleet: World) -> None:
    rows = metafleet.Fleet(fleet.fleet.folder).evaluations()
    assert {row["device"] for row in rows} == set(NAMES)
    assert all({"mae.speed", "mae.load", "r2.speed"} <= row.keys() and "accuracy" not in row for row in rows)
    page = metrics.text(figures_of(fleet.agents["a"]))
    assert 'metafleet_agent_mean_absolute_error{stage="after",output="speed"} ' in page


def test_two_agents_learn_over_the_embedded_broker(tmp_path: Path) -> None:
    with NUMBERS.live(tmp_path, 3) as made:
        found = outcome.of_fleet(made.folder)
        assert found["task"]["after"]["measures"]["r2"]["speed"] > found["task"]["before"]["measures"]["r2"]["speed"]
        assert found["rounds"][-1]["task"]["samples"] == 48
