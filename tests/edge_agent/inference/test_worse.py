"""What a user chooses or teaches must pass the same check as a new round: what answers the held-back samples worse does
not replace what answered before. It is refused with a reason, and nothing has changed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import device_commands
from edge_agent.compute import adapter
from edge_agent.device.local_samples import LocalData
from edge_agent.device.slots import Slots
from edge_agent.http.http_messages import Head, Request
from edge_agent.http.inference_protocol import InferenceProtocol
from edge_agent.http.serve import ServedModel
from edge_agent.inference import drift, relearn
from edge_agent.inference.service import Service
from edge_agent.inference.worse_model_check import HeldBack, WorseModel, why_worse
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import terminal
from fleet_core.base.errors import DataError, StateError
from fleet_core.board.device_settings import Personalize
from fleet_core.tasks.calibration import expected_calibration_error, gaps
from tests.support import homes
from tests.support.inprocess import toy

Array = np.ndarray[Any, Any]

X = toy(5).x[:6]
OF_A = toy(1).x[toy(1).y == 0]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "run", adapter.handle)


def device(folder: Path, method: str = "pfldyn-proto", toml: str = "") -> Service:
    """A device that answers as its method does, from its recording."""
    service = homes.service_with_model(homes.home(folder / "d0", toy(1), toml=toml), method)
    relearn.personalize(service)
    return service


def wrong(number: int = 100) -> tuple[Array, list[str]]:
    """Samples of class a under another name."""
    return np.resize(OF_A, (number, 8)).astype(np.float32), ["b"] * number


def held(service: Service) -> dict[str, bytes]:
    """Every file of the device except the locks and the sums over its answers."""
    home = service.slots.folder.parent
    return {str(path.relative_to(home)): path.read_bytes() for path in sorted(home.rglob("*"))
            if path.is_file() and path.suffix and path.name != drift.FILE}


def accuracy(service: Service) -> float:
    found = service.held_back()
    assert found is not None
    return float(found.figures["accuracy"])


# Taught samples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "how"), [("pfldyn-proto", "proto"), ("fedavg-meta", "sgd")])
def test_new_samples_that_would_make_the_answers_worse_are_not_stored(tmp_path: Path, method: str, how: str) -> None:
    service = device(tmp_path, method)
    before, files, was = service.answers(X), held(service), accuracy(service)
    assert before.personalization == how
    words = r"not kept, because with these samples: accuracy 0\.\d+ on 36 held-back samples, \d"
    with pytest.raises(DataError, match=words) as refused:
        relearn.learn(service, *wrong())
    assert "worse_by" in str(refused.value.hint)
    assert service.answers(X) == homes.restored(service.slots.folder.parent).answers(X) == before
    assert (held(service), accuracy(service)) == (files, was)
    right = toy(9, 4)
    said = relearn.learn(service, right.x, [homes.CLASSES[k] for k in right.y])
    assert (said["added_in_all"], said["personalization"]) == (4, how)
    assert accuracy(service) >= was - 0.1


def test_earlier_samples_stay_when_later_ones_are_not_stored(tmp_path: Path) -> None:
    service, right = device(tmp_path), toy(9, 4)
    relearn.learn(service, right.x, [homes.CLASSES[k] for k in right.y])
    before = service.answers(X)
    for _ in range(2):
        with pytest.raises(DataError, match="not kept"):
            relearn.learn(service, *wrong())
    assert service.local().added() == 4
    found = service.local().every()
    np.testing.assert_array_equal(found.x[-4:], right.x)
    assert service.answers(X) == before
    assert relearn.learn(service, X[:1], ["a"])["added_in_all"] == 5


def test_a_class_of_this_device_is_removed_with_its_samples(tmp_path: Path) -> None:
    service = device(tmp_path)
    x, labels = wrong()
    with pytest.raises(DataError, match="not kept"):
        relearn.learn(service, x, [*labels[2:], "goose", "goose"], new=True)
    assert service.local().names() == homes.CLASSES
    assert service.answers(X).classes == ()


def test_how_much_worse_is_too_much_is_the_setting_of_new_rounds(tmp_path: Path) -> None:
    service = device(tmp_path, toml="[serve]\nworse_by = 1.0\n")
    was = accuracy(service)
    assert relearn.learn(service, *wrong())["added_in_all"] == 100
    assert accuracy(service) < was - 0.1


def test_over_http_the_refusal_is_a_400_with_the_reason(tmp_path: Path) -> None:
    service = device(tmp_path)
    status, said = post(service, *wrong())
    assert status == 400
    assert "not kept" in said["error"]
    assert "held-back samples" in said["error"]


def test_the_calibration_error_of_held_back_samples_is_in_the_metadata_and_then_in_answers(tmp_path: Path) -> None:
    service = homes.restored(device(tmp_path).slots.folder.parent)
    model, held_back = ServedModel("t", service), service.local().held_back()
    assert held_back is not None
    assert model.calibration_error() is None, "the samples were not answered since the start"
    answers = service.predict(held_back.x)
    right = answers.argmax(1) == held_back.y
    wanted = expected_calibration_error(gaps(answers.max(1), right), len(right))
    response = InferenceProtocol(model).answer(Request(Head("GET", "/v2/models/t")))
    said = json.loads(response.body)["held_back"]
    assert (said["samples"], said["accuracy"]) == (36, pytest.approx(right.mean()))
    assert said["calibration_error"] == model.calibration_error() == pytest.approx(wanted, abs=1e-6)
    service.local().path.write_bytes(b"damaged")
    assert model.held_back() == {}


def post(service: Service, x: Array, labels: list[str]) -> tuple[int, Any]:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()},
        {"name": "label", "datatype": "BYTES", "shape": [len(labels)], "data": labels},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = Head("POST", "/v2/models/t/samples", {"content-length": str(len(body))})
    response = InferenceProtocol(ServedModel("t", service)).answer(Request(head, body))
    return response.status, json.loads(response.body)


def test_a_new_sample_still_costs_one_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-back samples were embedded once, by the session that answers."""
    service = device(tmp_path)
    relearn.learn(service, X[:1], ["a"])
    seen = homes.counted_runs(monkeypatch)
    relearn.learn(service, X[1:2], ["b"])
    assert [count for count in seen if count != 4] == [1], "beside the check of its four golden samples"


def test_after_a_new_sample_the_recording_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = device(tmp_path)
    relearn.learn(service, X[:1], ["a"])
    with monkeypatch.context() as patch:
        patch.setattr(LocalData, "held_back", lambda data: pytest.fail("the recording was read"))
        relearn.learn(service, X[1:2], ["a"])
        found = accuracy(service)
    assert found == accuracy(homes.restored(service.slots.folder.parent))


# A way that a person chooses ------------------------------------------------------------------------------------------


def ran_away(service: Service) -> None:
    relearn.personalize(service, Personalize("adapt", steps=1, rate=50.0))


def mislabelled(service: Service) -> None:
    service.local().add(*wrong())
    relearn.personalize(service)


@pytest.mark.parametrize("change", [ran_away, mislabelled])
def test_a_personalization_that_answers_worse_is_refused_and_the_model_before_continues(
    tmp_path: Path, change: Callable[[Service], None]
) -> None:
    service = device(tmp_path, "fedavg-meta")
    before, was = service.answers(X), accuracy(service)
    slots = {name: data for name, data in held(service).items() if name.startswith("slots")}
    with pytest.raises(WorseModel, match="not personalized, the former model answers") as refused:
        change(service)
    assert "worse_by" in str(refused.value.hint)
    assert service.answers(X) == homes.restored(service.slots.folder.parent).answers(X) == before
    assert {name: data for name, data in held(service).items() if name.startswith("slots")} == slots
    assert accuracy(service) == was


def test_a_choice_that_was_refused_does_not_apply_to_later_rounds(tmp_path: Path) -> None:
    service = device(tmp_path, "fedavg-meta")
    place = service.slots.folder.parent
    with pytest.raises(StateError, match="held-back samples"):
        device_commands.personalize(place, False, "adapt", 1, 50.0)
    assert Slots(service.stored.home).choice() is None


def test_few_held_back_samples_decide_nothing(tmp_path: Path) -> None:
    place = homes.home(tmp_path / "d0", toy(1).take(range(29)), toml="[data]\ntrain_fraction = 0.689655\n")
    service = homes.service_with_model(place, "pfldyn-proto")
    assert len(service.local().held_back() or ()) == 9
    assert relearn.learn(service, *wrong())["added_in_all"] == 100


# Samples that were added by hand --------------------------------------------------------------------------------------


def test_added_samples_are_listed_and_the_last_can_be_dropped(tmp_path: Path, capsys: Any) -> None:
    service = device(tmp_path)
    place, before = service.slots.folder.parent, service.answers(X)
    right = toy(9, 4)
    relearn.learn(service, right.x, [homes.CLASSES[k] for k in right.y])
    taught = service.answers(X)
    service.local().add(*wrong(30))
    assert [row["added"] for row in listed(place)] == [sum(right.y == 0), sum(right.y == 1) + 30, sum(right.y == 2)]
    assert {row["class"] for row in listed(place)} == set(homes.CLASSES)
    assert sum(row["recorded"] for row in listed(place)) == 54
    assert sum(row["held_back"] for row in listed(place)) == 36
    device_commands.drop(place, 30)
    assert "4 added samples are left" in capsys.readouterr().out
    relearn.personalize(service)
    assert service.answers(X) == taught
    device_commands.drop(place, 4)
    service.follow()
    relearn.learn(service, X[:1], ["a"])
    assert service.local().added() == 1, "what was dropped is not in the class means any more"
    alone = homes.service_with_model(homes.home(tmp_path / "other" / "d0", toy(1)), "pfldyn-proto")
    relearn.learn(alone, X[:1], ["a"])
    assert service.answers(X).probabilities == alone.answers(X).probabilities != before.probabilities
    with pytest.raises(DataError, match="1 samples were added"):
        device_commands.drop(place, 2)


def listed(place: Path) -> Any:
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "show", shown.append)
        device_commands.list_samples(place, as_json=True)
    return shown[0]


# A device that waits for its first samples ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pfldyn-proto", "fedper"])
def test_a_device_without_samples_says_what_it_needs_and_learns_over_http(
    tmp_path: Path, method: str
) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0"), method, load=False)
    with contextlib.suppress(DataError):  # class means want a sample at once, gradient steps when they are taken
        service.load(METHODS[method], {}, homes.weights_of(homes.served_weights(method)))
    with pytest.raises(StateError, match="there are no samples yet") as refused:
        service.answers(X)
    assert "edge-agent samples add" in str(refused.value.hint)
    assert "torch" not in str(refused.value)
    later = homes.reopened(service.slots.folder.parent)
    facts = ServedModel("t", later).facts()
    assert facts is not None
    assert not facts.ready
    status, said = post(later, toy(1).x[:9], [homes.CLASSES[k] for k in toy(1).y[:9]])
    assert (status, said["added_in_all"]) == (200, 9), said
    assert later.answers(X).personalization == {"pfldyn-proto": "proto", "fedper": "own"}[method]


def test_missing_personal_weights_are_reported_with_the_command_that_makes_them_without_torch(tmp_path: Path) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0", toy(1)), "fedper")
    with pytest.raises(StateError, match="weights of its own") as refused:
        service.answers(X)
    assert refused.value.hint == "edge-agent personalize"
    relearn.personalize(service)
    assert service.answers(X).personalization == "own"


def test_missing_personal_weights_that_only_a_trainer_makes_are_reported_with_the_trainer(tmp_path: Path) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0", toy(1)), "fedproto", graph=homes.plain())
    with pytest.raises(StateError, match="weights of its own") as refused:
        service.answers(X)
    assert "needs torch" in str(refused.value.hint)


def test_a_worse_model_is_refused_in_the_words_of_what_is_compared() -> None:
    then, now = (HeldBack(20, {}, "false alarms", "0.00 %", loss, "mean difference") for loss in (0.5, 0.8))
    assert why_worse(now, then, 0.1) == "mean difference 0.8 on 20 held-back samples, 0.5 before"
    assert why_worse(now, then, 0.4) == ""
    plain = [HeldBack(20, {}, "accuracy", text, loss) for text, loss in (("0.9", 0.1), ("0.5", 0.5))]
    assert why_worse(plain[1], plain[0], 0.1) == "accuracy 0.5 on 20 held-back samples, 0.9 before"
