"""The model that answers lies in one of two slots: it is whole whenever the process is killed, and a worse one is
rolled back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import device_commands
from edge_agent.compute import onnx_session
from edge_agent.device.slots import Pointer, Slots
from edge_agent.device.state import DeviceState
from edge_agent.inference import relearn, service, stored_models
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, terminal, trees
from fleet_core.base.errors import BundleError, StateError
from fleet_core.board.device_settings import Personalize
from fleet_core.learning import models
from fleet_core.model import graph_bundle, payloads
from fleet_core.protocol.round_messages import ModelRef
from tests.support import homes
from tests.support.inprocess import Killed, config_text, toy, world
from tests.support.world_checks import finished

X = toy(5).x[:6]
PROTO = METHODS["pfldyn-proto"]


def served(folder: Path, method: str = "pfldyn-proto") -> Path:
    """A device that answers with a model of round 1."""
    place = homes.home(folder / "d0", toy(1))
    homes.service_with_model(place, method)
    return place


def round_of(number: int, method: str = "pfldyn-proto", factor: float = 2.0) -> Any:
    return homes.weights_of(homes.served_weights(method, seed=1, factor=factor + number / 100), number)


def useless(number: int) -> Any:
    """An encoder that gives every sample the same embedding."""
    return homes.weights_of(trees.scale(homes.served_weights("pfldyn-proto"), np.float32(0)), number)


@pytest.mark.slow
def test_new_weights_go_to_the_slot_that_does_not_answer(tmp_path: Path) -> None:
    place = served(tmp_path)
    slots, device = Slots(DeviceState(place)), homes.restored(place)
    seen = [slots.pointer().slot]
    for number in (2, 3, 4):
        device.load(PROTO, {}, round_of(number))
        seen.append(slots.pointer().slot)
        held = {name: DeviceState(place).facts(f"slots/{name}/serve")["round"] for name in ("a", "b")}
        assert held[slots.pointer().slot] == str(number)
        assert held[slots.other()] == str(number - 1)
        assert homes.restored(place).answers(X) == device.answers(X)
    assert seen == ["a", "b", "a", "b"] or seen == ["b", "a", "b", "a"]


# Killed ---------------------------------------------------------------------------------------------------------------


def dying(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[int]:
    """From now on the process dies at its ``moment``-th rename or deletion, before it happens."""
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **named: Any) -> Any:
            count[0] += 1
            if count[0] == moment:
                raise Killed
            return real(*arguments, **named)
        return act

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    return count


def new_round(device: service.Service) -> None:
    device.load(PROTO, {}, round_of(2))


def new_way(device: service.Service) -> None:
    relearn.personalize(device, Personalize("head"))


def new_sample(device: service.Service) -> None:
    relearn.learn(device, np.full((1, 8), -3, np.float32), ["c"])


@pytest.mark.parametrize("change", [new_round, new_way, new_sample])
def test_killed_at_any_moment_the_device_answers_from_one_slot_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[service.Service], None]
) -> None:
    place = served(tmp_path)
    before = homes.restored(place).answers(X)
    whole = shutil.copytree(place, tmp_path / "whole")
    device = homes.restored(whole)
    change(device)
    after, seen, moment = device.answers(X), set(), 0
    assert after != before
    while True:
        moment += 1
        copy = shutil.copytree(place, tmp_path / f"copy{moment}")
        device = homes.restored(copy)
        with monkeypatch.context() as patch:
            count = dying(patch, moment)
            with contextlib.suppress(Killed):
                change(device)
        found = homes.restored(copy).answers(X)
        assert found in (before, after), f"killed at {moment}"
        seen.add(found == after)
        if count[0] < moment:
            break
    assert moment > 1
    assert seen == {False, True}


def test_a_killed_agent_answers_from_its_disk_when_it_is_back_and_takes_the_new_round(tmp_path: Path) -> None:
    w = world(tmp_path, config_text(rounds=2, devices=1, fleet="").replace("serve_every = 2", "serve_every = 1"))
    w.start_server()
    agent = w.start_agent("d0", toy(0))
    assert w.pump(lambda: agent.service.round == 1)
    before = agent.service.answers(X)
    w.kill_agent("d0")
    back = w.start_agent("d0")
    assert back.service.restore() == ""
    assert back.service.answers(X) == before
    assert w.pump(lambda: finished(w) and back.service.round == 2)
    w.close()


def test_a_damaged_slot_is_logged_and_the_other_one_answers(tmp_path: Path) -> None:
    place = served(tmp_path)
    device = homes.restored(place)
    before = device.answers(X)
    device.load(PROTO, {}, round_of(2))
    slots = Slots(DeviceState(place))
    slots.path(slots.pointer().slot, "serve").write_bytes(b"damaged")
    again = homes.reopened(place)
    assert "the weights of round 1 answer" in again.restore()
    assert again.answers(X) == before
    slots.path(slots.pointer().slot, "serve").with_suffix(".damaged").rename(slots.path(slots.pointer().slot, "serve"))
    slots.path(slots.other(), "serve").write_bytes(b"damaged too")
    with pytest.raises(StateError):
        homes.reopened(place).restore()


@pytest.mark.parametrize("data", [b"", b"{", b'{"slot": "c"}', b"[]"])
def test_a_damaged_pointer_costs_no_answer(tmp_path: Path, data: bytes) -> None:
    place = served(tmp_path)
    before = homes.restored(place).answers(X)
    (place / "slots" / "serving.json").write_bytes(data)
    assert Slots(DeviceState(place)).pointer() == Pointer()
    assert homes.restored(place).answers(X) == before


def test_a_damaged_personalization_is_made_again_from_the_samples(tmp_path: Path) -> None:
    place = served(tmp_path)
    before, slots = homes.restored(place).answers(X), Slots(DeviceState(place))
    path = slots.path(slots.pointer().slot, "personal")
    for data in (b"damaged", storage.pack({"x": np.zeros(3)}), storage.pack({"z": np.zeros(3)}, {"how": "proto"})):
        path.write_bytes(data)
        assert homes.restored(place).answers(X) == before
    device = homes.restored(place)
    relearn.personalize(device)
    assert homes.restored(place).stored.personalization(slots.pointer().slot) is not None


# The check ------------------------------------------------------------------------------------------------------------


def test_weights_that_answer_worse_are_rolled_back_and_not_tried_again_until_the_next_round(tmp_path: Path) -> None:
    place = served(tmp_path)
    device = homes.restored(place)
    before = device.answers(X)
    bad = useless(2)
    device.load(PROTO, {}, bad)
    assert device.answers(X) == before
    back = device.rolled_back
    assert back is not None
    assert (back.model, back.round) == (bad.model, 2)
    assert "on 36 held-back samples" in back.why
    [evaluation] = device.evaluate()
    assert evaluation.stage == "after", "the aggregator hears how the new weights did"
    for one in (device, homes.restored(place)):
        assert one.answers(X) == before
        assert one.answers_with(ref(bad.model, 2), PROTO)
        assert not one.answers_with(ref(bad.model, 3), METHODS["fedper"])
    device.load(PROTO, {}, round_of(3))
    assert device.rolled_back is None
    assert device.answers(X).round == 3


def ref(model: str, number: int) -> ModelRef:
    found, blob = ModelRef.__dataclass_fields__, None
    values: dict[str, Any] = {"model": model, "round": number, "blob": blob, "codec": "fp32", "base": None}
    return ModelRef(**{name: value for name, value in values.items() if name in found})


def test_how_much_worse_is_too_much_is_a_setting(tmp_path: Path) -> None:
    place = served(tmp_path)
    with (place / "device.toml").open("a") as file:
        file.write("[serve]\nworse_by = 1.0\n")
    device = homes.restored(place)
    device.load(PROTO, {}, useless(2))
    assert (device.answers(X).round, device.rolled_back) == (2, None)


@pytest.mark.parametrize(("held_back", "taken"), [(9, True), (10, False)])
def test_few_held_back_samples_decide_nothing(tmp_path: Path, held_back: int, taken: bool) -> None:
    own = 20
    place = homes.home(tmp_path / "d0", toy(1).take(range(own + held_back)),
                       toml=f"[data]\ntrain_fraction = {own / (own + held_back):.6f}\n")
    device = homes.service_with_model(place, "pfldyn-proto")
    evaluation = device.local().held_back()
    assert evaluation is not None
    assert len(evaluation) == held_back
    device.load(PROTO, {}, useless(2))
    assert (device.answers(X).round == 2) == taken


def test_a_model_without_valid_probabilities_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = served(tmp_path)
    device = homes.restored(place)
    before = device.answers(X)
    monkeypatch.setattr(service, "gives_probabilities", lambda *_: False)
    device.load(PROTO, {}, round_of(2))
    assert device.rolled_back is not None
    assert "not probabilities" in device.rolled_back.why
    with pytest.raises(StateError, match="not probabilities"):
        relearn.personalize(device)
    assert device.answers(X) == homes.restored(place).answers(X) == before


@pytest.mark.slow
def test_personal_weights_that_diverged_are_rolled_back(tmp_path: Path) -> None:
    place = homes.home(tmp_path / "d0", toy(1))
    device = homes.service_with_model(place, "fedavg-meta")
    before = device.answers(X)
    assert before.personalization == "none"
    wrong = {k: a * np.nan for k, a in storage.flatten(models.initial(homes.layout(), 0)).items()}
    device.adapted(wrong, 0)
    assert device.rolled_back is not None
    assert homes.restored(place).answers(X) == device.answers(X) == before


def test_a_rollback_is_logged_reported_to_the_aggregator_and_in_the_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = config_text(rounds=2, devices=1).replace("serve_every = 2", "serve_every = 1")
    w = world(tmp_path, text)
    w.start_server()
    agent = w.start_agent("d0", toy(0))
    assert w.pump(lambda: agent.service.round == 1)
    worse = "accuracy 0.100 on 36 held-back samples, 0.900 before"
    monkeypatch.setattr(agent.service._evaluator, "why_worse", lambda *_: worse)
    assert w.pump(lambda: finished(w) and w.logged("d0: the weights of round 2 were rolled back: accuracy 0.100"))
    assert w.logged("those of round 1 answer")
    assert w.logged("round 2: d0: the weights of round 2 were rolled back"), "the aggregator heard of it"
    assert agent.service.answers(X).round == 1
    for _ in range(20):
        w.step(1.0)
    assert len([line for line in w.lines if line.startswith("d0: the weights of round 2")]) == 1, "tried once"
    (agent.home.folder / "device.toml").write_text(homes.DEVICE)
    facts = status(agent.home.folder)
    assert (facts["serve"]["round"], facts["rolled_back"]["round"]) == (1, 2)
    w.kill_agent("d0")
    back = w.start_agent("d0")
    back.service.restore()
    for _ in range(20):
        w.step(1.0)
    assert back.service.answers(X).round == 1
    w.close()


def status(place: Path) -> Any:
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "show", shown.append)
        device_commands.status(place, as_json=True)
    return json.loads(json.dumps(shown[0]))


# Graphs ---------------------------------------------------------------------------------------------------------------


def test_the_golden_check_is_made_once_for_a_graph_and_a_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = served(tmp_path)
    checked: list[int] = []
    monkeypatch.setattr(stored_models, "check_golden", lambda graph: checked.append(1))
    homes.restored(place)
    assert checked == []
    monkeypatch.setattr(stored_models, "runtime_version", lambda: "99.0")
    homes.restored(place)
    assert checked == [1]
    homes.restored(place)
    assert checked == [1]


def test_a_graph_that_fails_its_check_answers_nothing(tmp_path: Path) -> None:
    place = served(tmp_path)
    slots = Slots(DeviceState(place))
    slots.point(Pointer(slots.pointer().slot))  # as under another runtime
    (path,) = place.glob("graph-*")
    graph = graph_bundle.unpack(path.read_bytes())
    path.write_bytes(graph_bundle.pack(graph_bundle.Graph(
        graph.layout, graph.graphs, {**graph.golden, "embed": graph.golden["embed"] + 1}, graph.info
    )))
    with pytest.raises(BundleError, match="golden outputs"):
        homes.restored(place)
    assert onnx_session.runtime_version() not in slots.pointer().checked


@pytest.mark.slow
def test_a_graph_stays_on_the_disk_as_long_as_a_slot_needs_it(tmp_path: Path) -> None:
    place = served(tmp_path)
    device, home = homes.restored(place), DeviceState(place)
    before = device.answers(X)
    first, data = device.graph_id or "", graph_bundle.pack(homes.stepping())
    device.install("e" * 32, graph_bundle.unpack(data))
    home.save_graph("e" * 32, data, keep=device.slots.graphs())
    assert homes.restored(place).answers(X) == before, "killed before weights came for it"
    for number in (2, 3):
        device.load(PROTO, {}, round_of(number))
    home.save_graph("e" * 32, data, keep=device.slots.graphs())
    assert [path.stem for path in place.glob("graph-*")] == ["graph-" + "e" * 32]
    assert first != "e" * 32
    assert homes.restored(place).answers(X) == device.answers(X)
    weights = device.slots.weights()
    assert weights is not None
    assert payloads.identity(weights.params) == device.answers(X).model
