"""Features of raw samples, their cache, and the choice of what computes them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.backbone import backbone_file, features, providers
from fleet_core.backbone.feature_cache import FeatureCache, keys_of
from fleet_core.backbone.features import Features, of_file
from fleet_core.backbone.onnx_runtime import CPU, Run
from fleet_core.base import storage
from fleet_core.base.errors import BundleError, DataError, StateError
from fleet_core.data.samples import Samples
from fleet_core.model.layout import InputSpec, Layout
from tests.support import backbones
from tests.support.backbones import SHAPE, WIDTH

CUDA, XNNPACK, TENSORRT = (f"{name}ExecutionProvider" for name in ("CUDA", "Xnnpack", "Tensorrt"))


@pytest.fixture
def made(tmp_path) -> Features:
    backbones.write(tmp_path / "b.safetensors")
    return of_file(tmp_path / "b.safetensors")


def raw(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(number, *SHAPE)).astype(np.float32)


def counted(monkeypatch) -> list[int]:
    """Sizes of the batches that are computed from now on."""
    sizes: list[int] = []
    of = Features.of

    def counting(self: Features, x: np.ndarray) -> np.ndarray:
        sizes.append(len(x))
        return of(self, x)

    monkeypatch.setattr(Features, "of", counting)
    return sizes


def test_features_do_not_depend_on_the_batch(made, monkeypatch):
    x = raw(70)
    whole = made.of(x)
    assert whole.shape == (70, WIDTH)
    assert whole.dtype == np.float32
    monkeypatch.setattr(features, "BATCH", 3)
    np.testing.assert_allclose(made.of(x), whole, rtol=1e-5, atol=1e-6)


def test_the_same_samples_are_computed_once(made, monkeypatch):
    sizes, x = counted(monkeypatch), raw(10)
    first = made.cached(x)
    assert np.array_equal(made.cached(x[::-1]), first[::-1])
    made.cached(np.concatenate([x[:4], raw(3, 1), x[:1]]))
    assert sizes == [10, 3]
    np.testing.assert_allclose(first, made.of(x), rtol=1e-5)


def test_samples_keep_their_labels(made):
    samples = Samples(raw(4), np.arange(4), classes=("a", "b", "c", "d"))
    found = made.samples(samples)
    assert found.x.shape == (4, WIDTH)
    assert list(found.y) == [0, 1, 2, 3]
    assert found.classes == samples.classes


def test_a_record_that_was_torn_is_computed_again(made, monkeypatch):
    x = raw(6)
    whole, path = made.cached(x), made.beside("features")
    data = bytearray(path.read_bytes())
    data[30] ^= 1  # a value of the first record
    path.write_bytes(data[:-5])  # the last record is cut
    sizes = counted(monkeypatch)
    assert np.array_equal(made.cached(x), whole) or np.allclose(made.cached(x), whole, rtol=1e-5)
    assert sizes == [2]


def test_the_cache_keeps_to_its_quota_and_to_what_is_in_use(tmp_path):
    cache = FeatureCache(tmp_path / "f", 3, quota=4 * (16 + 4 + 12))
    keys = [bytes([k]) * 16 for k in range(8)]
    cache.put({k: np.full(3, k[0], np.float32) for k in keys[:3]}, keys[:3])
    asked = [keys[2], *keys[3:8]]
    cache.put({k: np.full(3, k[0], np.float32) for k in keys[3:8]}, asked)
    found = cache.get(keys)
    assert list(found) == keys[2:6]  # 0 and 1 are not in use, 6 and 7 do not fit
    assert all((z == key[0]).all() for key, z in found.items())
    assert (tmp_path / "f").stat().st_size == 4 * 32


def test_a_full_disk_costs_time_alone(made, monkeypatch):
    monkeypatch.setattr(FeatureCache, "put", lambda *_: (_ for _ in ()).throw(StateError("full")))
    assert made.cached(raw(2)).shape == (2, WIDTH)


def test_keys_differ_where_samples_do():
    x = raw(3)
    assert len({*keys_of(x), *keys_of(-x)}) == 6


@pytest.mark.parametrize(("x", "text"), [
    (np.zeros((2, 2, 4), np.float32), "has shape"), (np.zeros((2, *SHAPE), np.uint8), "uint8"),
    (np.full((1, *SHAPE), np.nan, np.float32), "not finite"),
])
def test_other_samples_are_refused(made, x, text):
    with pytest.raises(DataError, match=text):
        made.of(x)


def test_another_backbones_file_is_refused(made):
    changed = replace(made, backbone=replace(made.backbone, id="0" * 32))
    with pytest.raises(BundleError, match="not the fleet's backbone"):
        changed.of(raw(1))


def test_the_input_of_a_model_of_features_is_scaled():
    z = np.random.default_rng(0).normal(3, 20, (500, 4)).astype(np.float32)
    spec = features.input_of(z)
    assert spec.shape == (4,)
    assert abs((z * spec.scale).std() - 1) < 1e-5
    assert features.input_of(np.ones((3, 2), np.float32)).scale == 1.0


# The layout -----------------------------------------------------------------------------------------------------------


def test_a_layout_without_a_backbone_is_as_it_was_before_there_were_any():
    plain = Layout("mlp", InputSpec((6,)), ("a", "b"), 4, ())
    assert "backbone" not in plain.to_json()
    assert plain.hash == "eaf231f15e3eb8e5"
    assert plain.sample == plain.input


def test_a_layout_knows_its_backbone(made):
    layout = Layout("mlp", InputSpec((WIDTH,)), ("a", "b"), 4, (), backbone=made.backbone)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert again.sample.shape == SHAPE
    assert replace(layout, backbone=replace(made.backbone, id="0" * 32)).hash != layout.hash


# The file -------------------------------------------------------------------------------------------------------------


def packed(**changes: Any) -> bytes:
    """A backbone's file with other arrays or facts."""
    arrays, metadata = storage.unpack(backbone_file.pack(backbones.backbone()))
    facts = {**json.loads(metadata["backbone"]), **changes.pop("info", {})}
    return storage.pack({**arrays, **changes}, {"backbone": json.dumps(facts)})


@pytest.mark.parametrize(("data", "text"), [
    (b"no", "is not safetensors"),
    (packed(info={"opset": 9}), "opset"),
    (packed(info={"width": 7}), "golden/z is float32"),
    (packed(more=np.zeros(1)), "holds golden/x"),
    (packed(**{"golden/x": np.zeros((17, *SHAPE), np.float32), "golden/z": np.zeros((17, WIDTH), np.float32)}),
     "no sound golden"),
    (packed(**{"golden/z": np.full((4, WIDTH), np.nan, np.float32)}), "no sound golden"),
    (packed(onnx=np.zeros(0, np.uint8)), "no sound golden"),
    (packed(info={"input": {"shape": [100_000, 100_000]}}), "values at most"),
])
def test_a_damaged_file_is_refused(data, text):
    with pytest.raises(BundleError, match=text):
        backbone_file.parsed(data)


# Providers ------------------------------------------------------------------------------------------------------------


class Machine:
    """Providers that take so many seconds each, on a clock of its own. wrong: those with other features."""

    def __init__(self, wrong: str = "", missing: str = "", **seconds: float):
        self.seconds, self.wrong, self.missing, self.now, self.opened = seconds, wrong, missing, 0.0, list[str]()
        self.backbone = backbones.backbone()

    def open(self, provider: str) -> Run:
        name = provider.removesuffix("ExecutionProvider")
        self.opened.append(name)
        if name == self.missing:
            raise RuntimeError("libcudart.so is not there")

        def run(x: np.ndarray) -> np.ndarray:
            self.now += self.seconds[name]
            z = self.backbone.golden["z"]
            return z * 2 if name == self.wrong else z

        return run

    def choose(self) -> providers.Choice:
        offered = [f"{name}ExecutionProvider" for name in self.seconds]
        return providers.choose(self.backbone, offered, self.open, clock=lambda: self.now)[0]


def test_the_fastest_provider_is_chosen():
    choice = Machine(CPU=1.0, Xnnpack=0.5, CUDA=0.1).choose()
    assert choice.provider == CUDA
    assert choice.seconds == pytest.approx({CPU: 0.25, XNNPACK: 0.125, CUDA: 0.025})


def test_a_little_faster_is_not_enough():
    assert Machine(CPU=1.0, Xnnpack=0.95).choose().provider == CPU


def test_a_provider_with_other_features_is_not_chosen():
    choice = Machine(CPU=1.0, CUDA=0.1, wrong="CUDA").choose()
    assert choice.provider == CPU
    assert "off by" in choice.refused[CUDA]


def test_a_provider_that_does_not_load_is_not_chosen():
    choice = Machine(CPU=1.0, CUDA=0.1, missing="CUDA").choose()
    assert choice.provider == CPU
    assert "libcudart" in choice.refused[CUDA]


def test_a_backbone_that_no_provider_computes_rightly_is_refused():
    with pytest.raises(BundleError, match="does not give its golden features"):
        Machine(CPU=1.0, wrong="CPU").choose()


def test_candidates_are_offered_and_tensorrt_only_if_the_profile_names_it():
    offered = [TENSORRT, CUDA, CPU, "AzureExecutionProvider"]
    assert providers.candidates(offered) == (CPU, CUDA)
    assert providers.candidates(offered, [TENSORRT, XNNPACK]) == (CPU, CUDA, TENSORRT)


def test_the_choice_is_kept_and_made_again_for_another_onnxruntime(made, monkeypatch):
    made.of(raw(1))
    kept = made.choice()
    assert kept.provider == CPU
    assert kept.of[0] == made.backbone.id
    calls: list[int] = []

    def choose(*given: object, **named: object) -> tuple[providers.Choice, Run]:
        calls.append(1)
        return kept, lambda x: x[:, 0, 0]

    monkeypatch.setattr(providers, "choose", choose)
    features._opened.cache_clear()
    made.of(raw(1))
    assert not calls
    providers.save(made.beside("providers.json"), replace(kept, of=("another",)))
    features._opened.cache_clear()
    features.measured(made)
    assert calls == [1]
    features._opened.cache_clear()


def test_a_damaged_choice_is_made_again(made):
    made.beside("providers.json").write_text("{")
    assert made.choice() is None
    assert features.measured(made).provider == CPU
