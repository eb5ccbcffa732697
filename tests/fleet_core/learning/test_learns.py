"""Every method learns: a small seeded experiment for each that beats a stated baseline.

Six devices with 25 samples of five classes in 20 values, of which three directions matter: too few for a device alone.
``shared``: a label means the same everywhere. ``permuted``: every device numbers the classes in its own way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.learning import local_training, models
from fleet_core.model.layout import InputSpec
from tests.support.simulation import Fleet, Samples, hyper_of

pytestmark = pytest.mark.slow

CLASSES, VALUES, DEVICES = 5, 20, 6
CHANCE = 1 / CLASSES
QUICK: dict[str, Any] = {"local_steps": 10, "head_steps": 5}
ADAPT: dict[str, Any] = {"inner_lr": 1.0, "inner_steps": 3, "first_rate": 1.0}  # far enough to tell labels apart
SERVER: dict[str, Any] = {"server_lr": 0.01}  # Chen's on Shakespeare
# method -> (labels, rounds, hyper-parameters besides the defaults, what it must beat and by how much)
CASES: dict[str, tuple[str, int, dict[str, Any], tuple[str, float]]] = {
    "fedavg": ("shared", 12, QUICK, ("local", 0.15)),
    "fedavg-meta": ("shared", 12, QUICK, ("local", 0.15)),
    "fedprox": ("shared", 12, QUICK, ("local", 0.15)),
    "feddyn": ("shared", 12, QUICK, ("local", 0.15)),
    "scaffold": ("shared", 12, QUICK, ("local", 0.15)),
    "knn-per": ("shared", 12, QUICK, ("local", 0.15)),
    "pfedme": ("shared", 20, {}, ("local", 0.1)),
    "pfedhn": ("shared", 12, QUICK, ("local", 0.15)),
    "pfedgp": ("permuted", 12, {}, ("local", 0.2)),
    "fedbabu": ("shared", 12, QUICK, ("local", 0.1)),
    "fedproto": ("shared", 12, QUICK, ("local", 0.04)),
    "lg-fedavg": ("shared", 15, QUICK, ("local", 0.03)),
    "fedavg-joint": ("shared", 12, QUICK, ("local", 0.15)),
    "local": ("permuted", 12, QUICK, ("chance", 0.3)),
    "fedper": ("permuted", 15, QUICK, ("local", 0.03)),
    "fedrep": ("permuted", 15, QUICK, ("local", 0.03)),
    "p-avg-proto": ("permuted", 12, QUICK, ("local", 0.15)),
    "pfldyn-proto": ("permuted", 12, QUICK, ("local", 0.15)),
    "pflscaf-proto": ("permuted", 12, QUICK, ("local", 0.15)),
    "metavers": ("permuted", 100, {}, ("local", 0.06)),
    "pfldyn-maml": ("permuted", 12, {**QUICK, **ADAPT}, ("local", 0.05)),
    "pflscaf-maml": ("permuted", 12, {**QUICK, **ADAPT}, ("local", 0.1)),
    "per-fedavg-exact": ("permuted", 12, {**QUICK, **ADAPT}, ("local", 0.1)),
    "per-fedavg-fo": ("permuted", 15, {**QUICK, **ADAPT}, ("local", 0.05)),
    "per-fedavg-hf": ("permuted", 12, {**QUICK, **ADAPT}, ("local", 0.1)),
    "fedmeta-maml": ("permuted", 60, {**SERVER, **ADAPT}, ("local", 0.1)),
    "fedmeta-fomaml": ("permuted", 60, {**SERVER, **ADAPT}, ("local", 0.05)),
    "fedmeta-metasgd": ("permuted", 60, {**SERVER, **ADAPT}, ("local", 0.08)),
}


def drawn(number: int, seed: int, names: Any) -> Samples:
    """Clouds around five centres in three directions; stronger noise in the others."""
    fixed, rng = np.random.default_rng(5), np.random.default_rng(seed)
    centres = 1.6 * fixed.normal(size=(CLASSES, 3))
    directions = np.linalg.qr(fixed.normal(size=(VALUES, VALUES)))[0]
    y = np.resize(np.arange(CLASSES), number)
    signal = centres[y] + 0.6 * rng.normal(size=(number, 3))
    x = np.concatenate([signal, 1.5 * rng.normal(size=(number, VALUES - 3))], 1) @ directions
    return x.astype(np.float32), np.asarray(names)[y].astype(np.int64)


def devices(labels: str) -> tuple[list[Samples], list[Samples]]:
    """What each device trains on, and what it is evaluated on."""
    names = [
        np.random.default_rng(i).permutation(CLASSES) if labels == "permuted" else np.arange(CLASSES)
        for i in range(DEVICES)
    ]
    return [drawn(25, 100 + i, n) for i, n in enumerate(names)], [drawn(300, 200 + i, n) for i, n in enumerate(names)]


def learned(name: str, labels: str, rounds: int, **hyper: Any) -> tuple[Fleet, float]:
    """A fleet after ``rounds`` rounds of all devices, and the mean accuracy of its devices."""
    layout = models.describe("mlp", InputSpec((VALUES,)), [str(k) for k in range(CLASSES)], {"hidden": [32]})
    data, test = devices(labels)
    fleet = Fleet(name, hyper_of(name, **hyper), data, layout, together=True)
    for _ in range(rounds):
        fleet.round()
    return fleet, fleet.accuracy(test)


@cache
def local(labels: str) -> float:
    """What devices reach alone, with at least as many steps."""
    return learned("local", labels, 15, local_steps=20)[1]


def test_every_method_has_an_experiment() -> None:
    assert CASES.keys() == METHODS.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_method_beats_its_baseline(name: str) -> None:
    labels, rounds, hyper, (baseline, margin) = CASES[name]
    _, accuracy = learned(name, labels, rounds, **hyper)
    assert accuracy > (CHANCE if baseline == "chance" else local(labels)) + margin


def test_one_jointly_trained_model_answers_by_class_means_and_by_its_head() -> None:
    """Each way nearly as well as the model that was trained for it alone."""
    test = devices("shared")[1]

    def of_head(fleet: Fleet) -> float:
        return float(np.mean([(local_training.predict_logits(fleet.model, fleet.evaluated, x).argmax(1) == y).mean()
                              for x, y in test]))

    joint, by_means = learned("fedavg-joint", "shared", 12, **QUICK)
    for found, alone in ((by_means, learned("p-avg-proto", "shared", 12, **QUICK)[1]),
                         (of_head(joint), of_head(learned("fedavg", "shared", 12, **QUICK)[0]))):
        assert found > local("shared") + 0.15
        assert found > alone - 0.03


@pytest.mark.parametrize("name", ["fedmeta-maml", "fedmeta-metasgd", "per-fedavg-exact", "pfldyn-maml"])
def test_the_defaults_of_maml_learn_as_well_where_labels_are_shared(name: str) -> None:
    """With small rates that start slowly; nothing is tuned for this task."""
    _, accuracy = learned(name, "shared", 100 if name.startswith("fedmeta") else 5)
    assert accuracy > local("shared") + 0.05


def test_with_permuted_labels_one_model_for_all_is_at_chance_and_class_means_are_not_affected() -> None:
    """The claim of Acar et al. for their ALID setting."""
    fleet, _ = learned("fedavg", "permuted", 12, **QUICK, finetune_steps=0)
    right = []
    for x, y in devices("permuted")[1]:
        right.append((local_training.predict_logits(fleet.model, fleet.evaluated, x).argmax(1) == y).mean())
    assert np.mean(right) < CHANCE + 0.15
    accuracies = [learned("p-avg-proto", labels, 12, **QUICK)[1] for labels in ("shared", "permuted")]
    assert min(accuracies) > local("permuted") + 0.15
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.02)


def test_a_device_that_never_took_part_profits_as_well() -> None:
    """Personalized on its own 25 samples, with its own labels."""
    own, test = (drawn(n, seed, [3, 1, 4, 0, 2]) for n, seed in ((25, 77), (300, 78)))
    for name, margin in (("p-avg-proto", 0.15), ("fedper", 0.0), ("fedbabu", -0.3)):
        fleet, _ = learned(name, "permuted", 12, **QUICK)
        assert (fleet.answers(own, test[0]) == test[1]).mean() > local("permuted") + margin
