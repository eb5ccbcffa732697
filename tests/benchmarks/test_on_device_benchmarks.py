"""Small versions of the personalization benchmarks, so that they keep working."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.on_device import (
    accuracy,
    answers,
    batches,
    fleets,
    homes,
    in_python,
    int8,
    latency,
    memory,
    parity,
    starting,
    tables,
    unknown,
    ways,
)
from benchmarks.on_device.cases import CLASSES, Case
from benchmarks.on_device.fleets import Plan
from cloud_server.results.result import environment
from edge_agent.compute import onnx_session
from fleet_core.base import storage
from fleet_core.data import samples as stored
from fleet_core.data.samples import Samples
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec
from fleet_core.personalization.nearest import Prototypes

pytestmark = pytest.mark.slow

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FOLDER = Path(answers.__file__).parent
SPEC = InputSpec((1, 2, 3), "uint8", 1 / 255, (0.4,), (0.2,))
TINY = Case("tiny", "mlp", SPEC, {"hidden": [5]})


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of the tiny model's bundles, by what their ``adapt`` moves."""
    return parity.bundles(TINY.layout(), tmp_path_factory.mktemp("bundles"))


# Parity, memory, latency ----------------------------------------------------------------------------------------------


def test_the_devices_steps_are_torchs_and_those_of_double_precision(bundles: dict[str, Path], tmp_path: Path) -> None:
    found = parity.differences(TINY.layout(), bundles, tmp_path, seed=0, support=12)
    for figure, bar in parity.BARS.items():
        assert set(found[figure]) == {"device-torch", "device-exact", "torch-exact"}
        assert all(0 <= difference <= bar for difference in found[figure].values())
    assert found["logits_after_10"]["device-exact"] > 0  # two computations, not one twice


@LINUX
def test_the_peak_of_a_command_is_its_own_and_not_that_of_the_process_that_starts_it() -> None:
    held = bytearray(200 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    small, large = (memory.launched([sys.executable, "-c", f"x = b'x' * ({mib} << 20)"]) for mib in (1, 64))
    assert small["peak"] < 50e6 < 60e6 < large["peak"] - small["peak"] < 70e6
    assert small["cpu_s"] > 0


@LINUX
def test_a_command_that_fails_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="gone"):
        memory.launched([sys.executable, "-c", "import sys; sys.exit('gone')"])


@LINUX
def test_a_program_with_a_device_has_no_torch_and_its_own_pages_are_part_of_all(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    place = homes.made(TINY, tmp_path / "made", graph_bundle.unpack(bundles["all"].read_bytes()))
    found = in_python.run(place.homes["proto"], place.x)
    assert not found["torch"]
    for moment in ("answered", "personalized"):
        one = found[moment]
        assert 10e6 < one["uss"] <= one["pss"] <= one["rss"] < 1.05 * found["peak"]["rss"], "a peak is counted late"


def test_answers_are_timed_on_a_device_that_took_its_steps(bundles: dict[str, Path], tmp_path: Path) -> None:
    place = homes.made(TINY, tmp_path / "made", graph_bundle.unpack(bundles["all"].read_bytes()))
    found = latency.of_place(place, calls=3)
    assert found["proto"]["personalization"] == "proto"
    assert found["maml"]["personalization"] == "sgd"
    for one in found.values():
        assert one["added_us"] == one["predict_us"] - one["bare_us"]
        assert one["met"] == (one["added_us"] <= one["allowed_us"])


def test_what_an_answer_may_add_is_the_larger_of_both_bars() -> None:
    assert latency.with_limit({"bare_us": 100.0, "predict_us": 149.0})["met"]
    assert not latency.with_limit({"bare_us": 100.0, "predict_us": 151.0})["met"]
    assert latency.with_limit({"bare_us": 1000.0, "predict_us": 1099.0})["met"]
    assert not latency.with_limit({"bare_us": 1000.0, "predict_us": 1101.0})["met"]


@LINUX
def test_samples_are_embedded_by_so_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, run_batch = list[int](), onnx_session.Session._run_batch

    def counted(self: onnx_session.Session, x: Any) -> Any:
        sizes.append(len(x))
        return run_batch(self, x)

    monkeypatch.setattr(onnx_session, "BATCH", onnx_session.BATCH)
    monkeypatch.setattr(onnx_session.Session, "_run_batch", counted)
    batches.make(TINY, tmp_path)
    found = batches.embedded(tmp_path, 200)
    assert sizes == [200, 200, 100]
    assert found["us"] > 0
    monkeypatch.setattr(batches, "BATCHES", (2, 4))
    assert set(batches.measured(tmp_path, 1)) == {"2", "4"}


# Accuracy -------------------------------------------------------------------------------------------------------------


def recordings() -> tuple[Samples, InputSpec]:
    """Six devices with 30 samples of each of three of ten classes, separable by a threshold."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(3), 180)
    x = (80 * y[:, None] + rng.integers(0, 40, (540, 6))).astype(np.uint8).reshape(-1, 1, 2, 3)
    client = np.repeat([f"device-{k}" for k in range(6)], 90)
    return Samples(x, y, client, np.tile(np.arange(90.0), 6), CLASSES), SPEC


PLAN = Plan("tiny", recordings, "mlp", validation=1, unseen=2, options={"hidden": [5]}, labels=(1, 5),
            training={method: fleets.Training(1) for method in accuracy.METHODS})  # fmt: skip


def test_evaluated_devices_do_not_train_and_a_withheld_class_is_in_no_training_sample() -> None:
    division, _ = fleets.divided(fleets.withheld(PLAN, 2), 0)
    evaluated = {*division.validation, *division.unseen}
    assert (len(division.validation), len(division.unseen)) == (1, 2)
    assert not evaluated & set(division.train.clients)
    assert len(division.train.clients) == 3
    assert set(division.train.y.tolist()) == {0, 1}
    for device in (*division.validation.values(), *division.unseen.values()):
        assert set(device.pool.y.tolist()) == set(device.query.y.tolist()) == {0, 1, 2}
        assert device.pool.time is not None
        assert device.query.time is not None
        assert device.pool.time.max() < device.query.time.min()


def test_every_way_is_evaluated_on_the_unseen_devices_without_torch(bundles: dict[str, Path], tmp_path: Path) -> None:
    """With untrained weights."""
    division, layout = fleets.divided(PLAN, 0)[0], TINY.layout()
    for kind, path in bundles.items():
        (tmp_path / f"{layout.hash}-{kind}.bundle").write_bytes(path.read_bytes())
    folder = tmp_path / "tiny" / "seed-0"
    folder.mkdir(parents=True)
    stored.save(folder / "train.npz", division.train)
    (folder / "layout.json").write_text(layout.to_json())
    rates = layout.extended(("rates",), ("body", "head")).zeros(("rates",))["rates"]
    weights: Any = {**models.initial(layout, 0), "rates": {name: array + 0.05 for name, array in rates.items()}}
    for method in accuracy.METHODS:
        storage.write_arrays(folder / f"{method}.safetensors", storage.flatten(weights))
    found = accuracy.evaluate(PLAN, 0, 1, tmp_path, print)
    assert set(found) == {way.name for way in ways.WAYS}
    for cells in found.values():
        assert set(cells) == {"1", "5"}
        assert all(set(cell["devices"]) == set(division.unseen) for cell in cells.values())
    assert found["head only"]["5"]["accuracy"] > 0.9 > found["not personalized"]["5"]["accuracy"]
    table = accuracy.table(PLAN, [found, found])
    assert table["Proto"]["5"]["accuracy"]["std"] == 0


def test_a_set_that_is_made_again_leaves_the_others_where_the_environment_is_the_same(tmp_path: Path) -> None:
    out, alike = tmp_path / "accuracy.json", {"draws": (1, 2), "environment": environment()}
    assert accuracy.beside(out, "sets", {"har": 1}, alike) == {**alike, "sets": {"har": 1}}
    storage.write_json(out, {**alike, "sets": {"har": 1, "omniglot": 2}})
    assert accuracy.beside(out, "sets", {"har": 3}, alike)["sets"] == {"har": 3, "omniglot": 2}
    other = {**alike, "environment": {"python": "3.0"}}
    assert accuracy.beside(out, "sets", {"har": 3, "omniglot": 4}, other)["sets"] == {"har": 3, "omniglot": 4}
    with pytest.raises(SystemExit, match="has omniglot with another environment"):
        accuracy.beside(out, "sets", {"har": 3}, other)


def test_macro_f1_is_the_mean_over_the_classes_that_are_requested() -> None:
    counts = np.array([[8, 2, 0], [0, 0, 0], [5, 0, 5]])
    assert answers.macro_f1(counts) == pytest.approx((16 / 23 + 10 / 15) / 2)


def test_the_quantized_encoder_answers_the_same_labels_as_the_encoder_as_it_is(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    division, layout = fleets.divided(PLAN, 0)[0], TINY.layout()
    (tmp_path / f"{layout.hash}-plain.bundle").write_bytes(bundles["plain"].read_bytes())
    folder = tmp_path / "tiny" / "seed-0"
    folder.mkdir(parents=True)
    stored.save(folder / "train.npz", division.train)
    (folder / "layout.json").write_text(layout.to_json())
    for method, _ in int8.WAYS.values():
        storage.write_arrays(folder / f"{method}.safetensors", storage.flatten(models.initial(layout, 0)))
    encoders = int8.encoders(PLAN, "fedavg", 0, tmp_path, lambda line: None)
    x = division.train.x[:40]
    off = np.abs(encoders["int8"].run(x) - encoders["fp32"].run(x)).max()
    assert 0 < off < 0.1 * np.abs(encoders["fp32"].run(x)).max(), "another encoder, of the same weights"
    found = int8.evaluated(PLAN, 0, 1, tmp_path, lambda line: None)
    assert set(found) == set(int8.WAYS)
    for cells in found.values():
        assert cells["5"]["int8"]["accuracy"] > 0.8 < cells["5"]["fp32"]["accuracy"]
    cell = int8.table(PLAN, [found, found])["Proto"]["5"]["accuracy"]
    assert cell["difference"]["mean"] == pytest.approx(cell["int8"]["mean"] - cell["fp32"]["mean"])


def test_an_int8_encoder_is_smaller_and_both_are_timed() -> None:
    found = int8.cost(TINY, 3, lambda line: None)
    assert found["times_as_fast"] == found["fp32_us"] / found["int8_us"]
    assert min(found["fp32_bytes"], found["int8_bytes"], found["fp32_us"]) > 0


# Unknown --------------------------------------------------------------------------------------------------------------


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    score, positive = rng.integers(0, 9, 60).astype(float), rng.random(60) < 0.3
    pairs = score[positive][:, None] - score[~positive]
    assert unknown.auroc(score, positive) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_withheld_classes_that_lie_far_are_all_called_unknown() -> None:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), 20)
    z = (30 * np.eye(3, 8)[y] + rng.normal(size=(60, 8))).astype(np.float32)
    own = y < 2
    means = Prototypes.empty(3, 8).add(z[own][::2], y[own][::2])
    found = unknown.figures(z[own][::2], y[own][::2], means, z, ~own)
    assert found["auroc"] == 1
    assert found["unseen_0.95"] == 1
    assert found["known_0.95"] < 0.1 < found["known_0.8"]


def test_a_version_is_started_from_its_own_folder() -> None:
    tree = starting.Tree(starting.ROOT)
    cost = tree.once("--version")
    assert 0 < cost["cpu_s"] <= 60
    assert cost["peak"] > 1 << 20
    with tree.living("there is no command", "serv") as (_, text):
        assert "did you mean 'serve'?" in text


# What is committed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(tables.TABLES))
def test_a_committed_result_becomes_a_table(name: str) -> None:
    text = tables.TABLES[name](json.loads((FOLDER / f"{name}.json").read_text()))
    rows = [line for line in text.splitlines() if line]
    assert len(rows) > 4
    assert all(line.startswith("| ") and line.endswith(" |") for line in rows)
