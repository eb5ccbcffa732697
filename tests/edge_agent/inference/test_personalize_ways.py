"""Every way to personalize on a device: its result, its cost, its requirements, and the message where it is
impossible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_agent.compute import adapter
from edge_agent.compute.onnx_session import _immutable
from edge_agent.device.local_samples import few_labels
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState
from edge_agent.inference import relearn
from edge_agent.inference.service import Service
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError, DataError, StateError
from fleet_core.board.device_settings import Personalize
from fleet_core.data.samples import Samples
from fleet_core.learning import local_training, losses, models
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import Neighbours
from fleet_core.personalization.unknown_class import Thresholds
from tests.support import homes
from tests.support.inprocess import toy
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

X = toy(5).x[:6]
HEADED, HEADLESS = "fedavg-meta", "pfldyn-proto"
NAMED = ("proto", "head", "knn", "adapt", "none")
WAYS = (*NAMED, "auto")
EMBED = ("proto", "head", "knn")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_adapter tests the child process."""
    monkeypatch.setattr(adapter, "run", adapter.handle)


def device(folder: Path, method: str = HEADED, samples: Samples | None = None, toml: str = "") -> Service:
    place = homes.home(folder / "d0", samples or toy(1), toml=toml)
    return homes.service_with_model(place, method)


def folder_of(service: Service) -> Path:
    return service.slots.folder.parent


def by(service: Service, way: str, **more: Any) -> relearn.Personalized:
    return relearn.personalize(service, Personalize(way, **more))


def embedded(service: Service, method: str, x: Any) -> Any:
    """The samples' embeddings, by torch."""
    weights = {**models.initial(homes.layout(), 0), **homes.served_weights(method)}
    return local_training.embed(models.build(homes.layout()), weights, x)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples in each run of a session."""
    return homes.counted_runs(monkeypatch)


# What they give -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", EMBED)
def test_answers_from_embedded_samples_are_those_of_torchs_embeddings(tmp_path: Path, way: str) -> None:
    service = device(tmp_path, HEADLESS)
    own = service.local().own()
    said = by(service, way)
    assert (said.how, said.samples, sum(said.per_class.values())) == (way, len(own), len(own))
    z, at = (embedded(service, HEADLESS, x) for x in (own.x, X))
    if way == "proto":
        means = losses.prototypes(torch.tensor(z), torch.tensor(own.y), 3)
        wanted = torch.softmax(losses.proto_logits(torch.tensor(at), *means), 1).numpy()
    elif way == "head":
        wanted = Head.fit(z, own.y, 3).probabilities(at)
    else:
        wanted = Neighbours(z, own.y, 3, 10, 1.0).votes(at)
    np.testing.assert_allclose(service.predict(X), wanted, atol=2e-5)


@pytest.mark.slow
def test_with_none_chosen_the_served_model_answers_unpersonalized(tmp_path: Path) -> None:
    service = device(tmp_path, toml="[serve]\nworse_by = 1.0\n")
    by(service, "adapt")
    own = service.predict(X)
    assert by(service, "none").how == "none"
    logits = local_training.predict_logits(models.build(homes.layout()), homes.served_weights(HEADED), X)
    np.testing.assert_allclose(service.predict(X), torch.softmax(torch.tensor(logits), 1).numpy(), atol=1e-5)
    assert np.abs(service.predict(X) - own).max() > 1e-3


@pytest.mark.slow
def test_steps_and_rate_can_be_chosen(tmp_path: Path) -> None:
    service = device(tmp_path)
    found = {}
    for steps, rate in ((1, 0.05), (1, 0.2), (4, 0.05)):
        by(service, "adapt", steps=steps, rate=rate)
        found[steps, rate] = service.predict(X)
    by(service, "adapt", steps=1, rate=0.05)
    np.testing.assert_array_equal(service.predict(X), found[1, 0.05])
    assert len({array.tobytes() for array in found.values()}) == 3
    by(service, "head", steps=2)
    few = service.predict(X)
    by(service, "head")
    assert np.abs(service.predict(X) - few).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("way", NAMED)
def test_a_restart_answers_the_same_and_the_choice_applies_to_later_rounds(tmp_path: Path, way: str) -> None:
    service = device(tmp_path)
    by(service, way)
    with service.slots.writing():
        service.slots.set_choice(Personalize(way))
    place = folder_of(service)
    again = homes.restored(place)
    assert again.answers(X) == service.answers(X)
    plan = again.load(METHODS[HEADED], {}, homes.weights_of(homes.served_weights(HEADED, factor=2.1), 2), trainer=True)
    if way == "adapt":
        assert plan.kind == "steps"
        again.adapted(adapter.handle(again.steps(plan)).arrays, 0)
    assert (again.answers(X).round, again.personalization) == (2, {"adapt": "sgd"}.get(way, way))
    assert homes.restored(place).answers(X) == again.answers(X)


def test_device_toml_decides_if_nothing_was_chosen(tmp_path: Path) -> None:
    service = device(tmp_path, toml='[personalize]\nby = "head"\nsteps = 7\n')
    assert service.answers(X).personalization == "head"
    own = service.local().own()
    z, at = (embedded(service, HEADED, x) for x in (own.x, X))
    np.testing.assert_allclose(service.predict(X), Head.fit(z, own.y, 3, steps=7).probabilities(at), atol=2e-5)


# What they cost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [HEADED, HEADLESS])
def test_a_new_model_is_held_once_in_the_pages_of_its_file(tmp_path: Path, method: str) -> None:
    service = device(tmp_path, method)
    weights = homes.weights_of(homes.served_weights(method, factor=2.1), 2)
    service.load(METHODS[method], {}, weights)
    assert service.answering is not None
    assert (service.answering.round, service.answering.how) == (2, "none" if method == HEADED else "proto")
    arrays = service.answering.predictor.session._weights.values()
    assert arrays
    assert all(_immutable(array) is array for array in arrays), "no array is a copy"


@pytest.mark.parametrize("way", EMBED)
def test_one_new_labelled_sample_costs_one_embedding(tmp_path: Path, way: str, rows: list[int]) -> None:
    service = device(tmp_path, HEADLESS)
    by(service, way)
    with service.slots.writing():
        service.slots.set_choice(Personalize(way))
    relearn.learn(service, X[:1], ["a"])  # the first counts with the others, of which none is embedded anew
    rows.clear()
    said = relearn.learn(service, X[1:2], ["b"])
    assert [count for count in rows if count != 4] == [1], "beside the check of its four golden samples"
    assert (said["personalization"], said["added_in_all"]) == (way, 2)
    found = service.predict(X)
    by(service, way)
    np.testing.assert_allclose(service.predict(X), found, atol=1e-5)
    rows.clear()
    by(service, way)
    assert [count for count in rows if count != 4] == [], "nothing is new"


def test_running_means_are_exact_if_the_embeddings_are_too_many_to_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[int]
) -> None:
    monkeypatch.setattr("edge_agent.inference.embedded_support.MAX_CACHED", 10)
    service = device(tmp_path, HEADLESS)
    relearn.personalize(service)
    kept = service.stored.personalization(service.slots.pointer().slot)
    assert kept is not None
    assert kept.support is None
    rows.clear()
    relearn.learn(service, X[:1], ["a"])
    assert [count for count in rows if count != 4] == [1]
    found = service.predict(X)
    relearn.personalize(service)
    np.testing.assert_allclose(service.predict(X), found, atol=1e-5)
    for way in ("head", "knn"):
        by(service, way)
        assert homes.restored(folder_of(service)).answers(X) == service.answers(X)


WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, onnx=None, onnxscript=None)  # as if they were not installed
from edge_agent.commands.cli import main
main()
"""


@pytest.mark.slow
def test_the_command_personalizes_without_torch_and_another_process_answers_the_same(tmp_path: Path) -> None:
    place = folder_of(device(tmp_path))
    np.save(tmp_path / "x.npy", X)

    def edge_agent(*arguments: object) -> Any:
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, arguments), "--home", str(place), "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    said = edge_agent("personalize", "--by", "adapt", "--steps", 2)
    assert (said["personalization"], said["samples"]) == ("sgd", 54)
    assert said["held_back"]["samples"] == 36
    found = edge_agent("predict", tmp_path / "x.npy")
    mine = homes.restored(place).answers(X)
    assert (found["labels"], found["personalization"]) == (list(mine.labels), "sgd")
    np.testing.assert_allclose(found["probabilities"], mine.probabilities, atol=1e-6)
    assert Slots(DeviceState(place)).choice() == Personalize("adapt", steps=2)


# What they need -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "way", "words", "working"), [
    (HEADLESS, "adapt", "has no graph 'adapt'", "method, proto, head, knn, auto"),
    (HEADLESS, "none", "are not a complete model", "method, proto, head, knn, auto"),
    ("knn-per", "adapt", "has no graph 'adapt'", "method, proto, head, knn, none, auto"),
    ("lg-fedavg", "proto", "each device has its own encoder", "method, adapt"),
    ("fedper", "none", "are not a complete model", "method, proto, head, knn, adapt, auto"),
])
def test_an_impossible_personalizer_is_refused_with_the_reason_and_the_possible_ones(
    tmp_path: Path, method: str, way: str, words: str, working: str
) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0", toy(1)), method)
    with pytest.raises(ConfigError, match=words) as refused:
        by(service, way)
    assert refused.value.expected == f"one of {working}"


@pytest.mark.parametrize(("choice", "words"), [
    (Personalize("proto", steps=3), "steps or a rate for personalizing by proto"),
    (Personalize("head", rate=0.1), "steps or a rate for personalizing by head"),
    (Personalize("none", rate=0.1), "steps or a rate for personalizing by none"),
    (Personalize("head", frequent=True), "frequent is a setting of class means, and this personalizer is head"),
])
def test_settings_that_a_personalizer_lacks_are_refused(tmp_path: Path, choice: Personalize, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        relearn.personalize(device(tmp_path), choice)


@pytest.mark.slow
def test_a_method_with_learned_rates_refuses_a_rate(tmp_path: Path) -> None:
    service = device(tmp_path, "fedmeta-metasgd")
    with pytest.raises(ConfigError, match="learns the rates"):
        by(service, "adapt", rate=0.1)
    assert by(service, "adapt", steps=2).how == "meta-sgd"


@pytest.mark.parametrize("method", ["pfedme", "fedproto"])
def test_steps_that_only_the_trainer_takes_are_refused_with_what_works_here(tmp_path: Path, method: str) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0", toy(1)), method, graph=homes.plain())
    with pytest.raises(StateError, match="personalizes by gradient steps") as refused:
        relearn.personalize(service)
    assert str(refused.value.hint).startswith("'edge-agent run' takes them")
    if method == "pfedme":
        assert "--by proto, head, knn, none" in str(refused.value.hint)
        assert by(service, "proto").how == "proto"


def test_trained_personal_groups_are_not_replaced_by_gradient_steps(tmp_path: Path) -> None:
    service = device(tmp_path, "fedper")
    assert relearn.personalize(service).how == "own"
    state = folder_of(service) / "methods" / "t.fedper-v1-x-e0" / "state.safetensors"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"")
    with pytest.raises(StateError, match="personalizes by gradient steps"):
        relearn.personalize(service)


# Few labels -----------------------------------------------------------------------------------------------------------


def some(*labels: int) -> Samples:
    """One sample of each label, in the part that is learned from; none is held back."""
    x = np.eye(3, 8, dtype=np.float32)[list(labels)] * 3
    return Samples(x + np.arange(len(labels), dtype=np.float32)[:, None] / 50, np.array(labels), classes=homes.CLASSES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("labels", [(0, 0, 1, 1), (2,), (2, 2), (0, 1, 2), (0,) * 5 + (1,)])
def test_few_labels_are_enough_for_every_personalizer(tmp_path: Path, way: str, labels: tuple[int, ...]) -> None:
    """No label of a class, one class only, one sample of each class."""
    service = homes.service_with_model(homes.home(tmp_path / "d0", toml="[serve]\nunknown = true\n"), HEADED)
    x, y = some(*labels).x, some(*labels).y
    service.local().add(x, [homes.CLASSES[k] for k in y])
    by(service, way)
    found = service.answers(x)
    assert len(found.labels) == len(labels)
    np.testing.assert_allclose(np.sum(found.probabilities, axis=1), 1, atol=1e-5)
    if way in ("proto", "head"):
        assert set(found.labels) <= {homes.CLASSES[k] for k in labels}, "a class without a sample is never answered"
        absent = [k for k in range(3) if k not in labels]
        assert (np.array(found.probabilities)[:, absent] == 0).all()
    assert len(found.unknown) == (len(labels) if way in (*EMBED, "auto") else 0)
    assert homes.restored(folder_of(service)).answers(x) == found


@pytest.mark.parametrize("way", WAYS)
def test_without_samples_a_personalizer_is_refused_and_the_served_model_answers(tmp_path: Path, way: str) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0"), HEADED)
    assert service.answers(X).personalization == "none"
    before = service.answers(X)
    if way == "none":
        assert by(service, way).samples == 0
    else:
        with pytest.raises(DataError, match="no samples yet") as refused:
            by(service, way)
        assert refused.value.hint == "edge-agent samples add"
    assert service.answers(X) == homes.restored(folder_of(service)).answers(X) == before


def test_a_device_without_samples_and_without_a_head_answers_once_it_has_one(tmp_path: Path) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d0"), HEADLESS, load=False)
    with pytest.raises(DataError, match="no samples yet"):
        service.load(METHODS[HEADLESS], {}, homes.weights_of(homes.served_weights(HEADLESS)))
    with pytest.raises(StateError):
        service.answers(X)
    relearn.learn(service, X[:1], ["b"])
    assert service.answers(X).labels == ("b",) * len(X)
    assert homes.restored(folder_of(service)).answers(X) == service.answers(X)


# Classes of the device alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", EMBED)
def test_a_class_that_the_fleet_does_not_have_is_learned_here(tmp_path: Path, way: str) -> None:
    service = device(tmp_path)
    with service.slots.writing():
        service.slots.set_choice(Personalize(way))
    relearn.personalize(service)
    new = np.full((4, 8), -9, np.float32) + np.arange(4, dtype=np.float32)[:, None] / 10
    relearn.learn(service, new, ["goose"] * 4, new=True)
    found = service.answers(np.concatenate([new, X]))
    assert found.labels[:4] == ("goose",) * 4
    assert found.classes == (*homes.CLASSES, "goose")
    assert "goose" not in found.labels[4:]
    assert {len(row) for row in found.probabilities} == {4}
    again = homes.restored(folder_of(service))
    assert again.answers(np.concatenate([new, X])) == found
    [evaluation] = [j for j in again.evaluate() if j.stage == "after"]
    assert np.array(evaluation.confusion).shape == (3, 3)
    assert set(service.local().own().y) == {0, 1, 2}, "nothing trains on it"
    said = by(service, "adapt")
    assert said.left_out == 4
    assert service.answers(X).classes == ()


def test_a_shared_head_refuses_a_class_that_the_fleet_does_not_have(tmp_path: Path) -> None:
    service = device(tmp_path)
    with pytest.raises(ConfigError, match="unknown class 'goose'") as refused:
        relearn.learn(service, X[:1], ["goose"], new=True)
    assert "--by proto, head or knn" in str(refused.value.hint)
    assert not service.local().added_path.exists()


def test_at_the_command_line_a_new_class_needs_an_option(tmp_path: Path) -> None:
    service = device(tmp_path, HEADLESS)
    with pytest.raises(ConfigError, match="unknown class 'goose'") as refused:
        relearn.check_labels(service, ["goose"], new=False)
    assert "--new-class" in str(refused.value.hint)
    relearn.check_labels(service, ["goose"], new=True)
    for wrong in ("", "x" * 65, "a\nb"):
        with pytest.raises(ConfigError, match="unknown class"):
            relearn.check_labels(service, [wrong], new=True)
    relearn.learn(service, X[:1], ["goose"], new=True)
    relearn.check_labels(service, ["goose"], new=False)


# Unknown --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", NAMED)
def test_samples_of_unknown_classes_are_marked_if_the_setting_is_on(tmp_path: Path, way: str) -> None:
    far = np.concatenate([X, np.full((2, 8), 40, np.float32)])
    service = device(tmp_path, toml="[serve]\nunknown = true\nunknown_quantile = 0.8\n")
    by(service, way)
    found = service.answers(far).unknown
    assert service.answering is not None
    assert service.answering.detects_unknown == (way in EMBED)
    if way not in EMBED:
        assert found == ()
        return
    own = service.local().own()
    z, at = (embedded(service, HEADED, x) for x in (own.x, far))
    means = losses.prototypes(torch.tensor(z), torch.tensor(own.y), 3)[0].numpy()
    kept = service.stored.personalization(service.slots.pointer().slot)
    assert kept is not None
    np.testing.assert_allclose(kept.prototypes.prototypes, means, atol=1e-5)
    limit = Thresholds.calibrate(z, own.y, kept.prototypes, 0.8).distances[0]
    wanted = ((at[:, None] - means) ** 2).sum(2).min(1) > limit
    assert found == tuple(wanted)
    assert found[-1]
    assert homes.restored(folder_of(service)).answers(far).unknown == found


def test_samples_of_unknown_classes_are_not_marked_by_default(tmp_path: Path) -> None:
    service = device(tmp_path, HEADLESS)
    assert service.answers(np.full((1, 8), 40, np.float32)).unknown == ()


def test_few_labels_counts_only_classes_with_samples() -> None:
    assert few_labels({"a": 5, "b": 9}) == ""
    assert few_labels({"a": 5, "b": 0}) == ""
    assert few_labels({"a": 4, "b": 0, "c": 1}).startswith("note: few labelled samples (a 4, c 1): answers come of")
