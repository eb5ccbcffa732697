"""``metafleet export`` and ``metafleet bundle verify``: what is written, refused and printed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cloud_server.commands import bundle as bundle_cli
from cloud_server.commands import cli as operator_cli
from cloud_server.records.checkpoint import Checkpoints, ServedModel
from export import full_bundle as making
from export import gate as torch_gate
from export import int8_encoder
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import BundleError
from fleet_core.data.samples import save
from fleet_core.learning import models
from fleet_core.model import graph_bundle, payloads
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import Layout
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import Bundle
from fleet_core.personalization.gradient_steps import steps_of
from tests.support.bundles import bundle_of, graph_of, plain, samples, served_fleet, served_params
from tests.support.cli import Run, runner

pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "metafleet", operator_cli.main)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet that served a model after round 2 and has a checkpoint of round 3."""
    return served_fleet(tmp_path_factory.mktemp("evaluated") / "fleet").folder


def layout_of(fleet: Path) -> Layout:
    return graph_bundle.unpack((fleet / "graph.safetensors").read_bytes()).layout


def test_a_fleets_served_model_is_written_and_found_sound(fleet: Path, run: Run, tmp_path: Path) -> None:
    code, out, err = run("export", fleet, "--to", tmp_path / "b", "--json")
    assert code == 0, err
    result = json.loads(out)
    found = device_bundle.read(tmp_path / "b")
    wanted = served_params(METHODS["pfldyn-proto"], layout_of(fleet))
    assert (result["round"], result["model"]) == (2, payloads.identity(wanted))
    for key, array in storage.flatten(wanted).items():
        np.testing.assert_array_equal(storage.flatten(found.params)[key], array)
    assert found.manifest.key == (fleet / "fleet.pub").read_text().strip()
    assert result["graphs"].keys() == {"embed", "predict"}

    code, out, err = run("bundle", "verify", tmp_path / "b", "--json")
    assert (code, err) == (0, "")
    verified = json.loads(out)
    assert verified["torch"] is True
    assert verified["onnxruntime"] == result["onnxruntime"]
    code, out, err = run("bundle", "verify", tmp_path / "b")
    assert (code, err) == (0, "")
    assert "sound; pfldyn-proto, mlp of round 2, no gradient steps" in out
    assert "compared with torch" in out
    assert f"signed by the fleet's key {found.manifest.key[:16]}" in out
    assert (found.signed, result["signed"], verified["signed"]) == (True, True, True)
    (tmp_path / "b" / "manifest.sig").unlink()
    assert "not signed" in run("bundle", "verify", tmp_path / "b")[1]


def test_where_the_fleets_key_is_not_a_bundle_is_not_signed_and_says_so(
    fleet: Path, run: Run, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(fleet, tmp_path / "copy"))
    (copy / "fleet.key").unlink()
    code, _, err = run("export", copy, "--to", tmp_path / "b")
    assert (code, "not signed, because fleet.key is not here" in err) == (0, True)
    with pytest.raises(BundleError, match=r"has no manifest\.sig"):
        device_bundle.read(tmp_path / "b", signed=True)


def test_a_checkpoint_gives_the_served_model_of_its_round(fleet: Path, run: Run, tmp_path: Path) -> None:
    state = fleet / "state" / "round-000000003.safetensors"
    code, _, err = run("export", state, "--to", tmp_path / "b.bundle", "--stored", "fp16")
    assert code == 0, err
    found = device_bundle.read(tmp_path / "b.bundle")
    assert (found.manifest.model.round, found.manifest.model.stored) == (3, "fp16")
    wanted = served_params(METHODS["pfldyn-proto"], layout_of(fleet), 10)
    for key, array in storage.flatten(found.params).items():
        np.testing.assert_array_equal(array, storage.flatten(wanted)[key].astype(np.float16).astype(np.float32))


def test_an_int8_encoder_comes_with_its_cost(fleet: Path, run: Run, tmp_path: Path) -> None:
    save(tmp_path / "data.npz", samples(90, seed=1))
    code, out, err = run("export", fleet, "--to", tmp_path / "b", "--int8", tmp_path / "data.npz", "--json")
    assert code == 0, err
    cost = json.loads(out)["int8_cost"]
    assert (cost["calibrated"], cost["tasks"], cost["shots"]) == (30, 20, 5)
    assert cost["queries"] == 20 * (60 - 15)
    assert cost["fp32"] > 0.8
    assert abs(cost["int8"] - cost["fp32"]) < 0.1
    assert 0 < cost["difference"] < 0.3
    assert "accuracy" in err
    model = onnx.load(tmp_path / "b" / "embed-int8.onnx")
    assert (model.ir_version, model.opset_import[0].version) == (10, 18)
    scales = {t.name: list(t.dims) for t in model.graph.initializer if t.name.endswith("weight_scale")}
    assert scales == {"body/layers.0.weight_scale": [100]}, "one for each channel"
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in model.graph.node}
    assert run("bundle", "verify", tmp_path / "b")[0] == 0


def test_what_calibrates_does_not_evaluate() -> None:
    y = np.repeat([0, 1, 2], [600, 30, 4])
    chosen, rest = int8_encoder._split(y)
    assert not set(chosen) & set(rest)
    assert len(chosen) <= int8_encoder.MAX_CALIBRATION
    assert set(y[rest]) == {0, 1, 2}
    assert set(y[int8_encoder._split(y[y > 0])[0] + 600]) == {1, 2}


def test_data_that_do_not_calibrate_are_refused(fleet: Path, run: Run, tmp_path: Path) -> None:
    few, wide = samples(5), samples(30)
    save(tmp_path / "few.npz", few)
    save(tmp_path / "wide.npz", type(wide)(np.c_[wide.x, wide.x], wide.y, classes=wide.classes))
    for name, complaint in (("few", "at least two classes with three samples"), ("wide", "has shape [30, 16]")):
        code, _, err = run("export", fleet, "--to", tmp_path / "b", "--int8", tmp_path / f"{name}.npz")
        assert (code, complaint in err) == (2, True), err
        assert not (tmp_path / "b").exists()


# What is not written --------------------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(fleet: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").write_text("")
    stranger = fleet.parent / "state-of-nobody"
    stranger.write_text("")
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    (untrained / "fleet.toml").write_bytes((fleet / "fleet.toml").read_bytes())
    cases = {
        ("export", fleet, "--to", tmp_path / "there"): "exists already",
        ("export", fleet, "--to", tmp_path / "b", "--stored", "fp8"): "unknown --stored 'fp8'; expected fp32 or fp16",
        ("export", tmp_path, "--to", tmp_path / "b"): "there is no fleet here",
        ("export", tmp_path / "elsewhere", "--to", tmp_path / "b"): "neither a fleet's folder nor a checkpoint",
        ("export", stranger, "--to", tmp_path / "b"): "neither a fleet's folder nor a checkpoint",
        ("export", untrained, "--to", tmp_path / "b"): "no model was evaluated here yet",
    }
    before = {path.name for path in tmp_path.iterdir()}
    for arguments, complaint in cases.items():
        code, out, err = run(*arguments)
        assert (code, out, complaint in err) == (2, "", True), err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_damaged_or_foreign_model_is_refused(run: Run, tmp_path: Path) -> None:
    fleet = served_fleet(tmp_path / "fleet").folder
    served = fleet / "state" / "served.safetensors"
    whole = bytearray(served.read_bytes())
    whole[-1] ^= 1
    served.write_bytes(bytes(whole))
    code, _, err = run("export", fleet, "--to", tmp_path / "b")
    assert (code, "is damaged" in err) == (1, True)
    other = {"body": {"layers.0.weight": np.zeros((3, 2), np.float32)}}
    Checkpoints(fleet / "state").save_served(ServedModel(2, other))
    code, _, err = run("export", fleet, "--to", tmp_path / "b")
    assert (code, "is of another model" in err) == (1, True)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("fails", ["with torch", "without torch"])
def test_a_bundle_that_fails_the_gate_is_not_written(
    fleet: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refuse(graph: Any, network: Any) -> None:
        raise BundleError("the graph 'embed' differs from torch")

    made = bundle_of("pfldyn-proto")
    golden = {**made.graph.golden, "embed": made.graph.golden["embed"] + np.float32(0.5)}
    if fails == "with torch":
        monkeypatch.setattr(torch_gate, "check", refuse)
    else:
        manifest = replace(made.manifest, key=(fleet / "fleet.pub").read_text().strip())
        broken = replace(made, manifest=manifest, graph=replace(made.graph, golden=golden))
        monkeypatch.setattr(bundle_cli, "_export_bundle", lambda *asked: broken)
    code, out, err = run("export", fleet, "--to", tmp_path / "b")
    complaint = "differs from torch" if fails == "with torch" else "does not give its golden outputs"
    assert (code, out, complaint in err) == (1, "", True), err
    assert list(tmp_path.iterdir()) == []


def test_a_method_that_has_no_answers_without_training_is_not_exported() -> None:
    method = METHODS["fedproto"]
    made = bundle_of("pfldyn-proto")
    served = making.Served("desk", made.manifest.key, method, method.hyper(), 1, {}, {})
    with pytest.raises(BundleError, match="a device without torch cannot answer with fedproto"):
        making.whole(served, made.graph, stored="fp32", data=None, say=lambda line: None)


def whole_of(graph: Graph, name: str, **hyper: Any) -> Bundle:
    method, layout = METHODS[name], graph.layout
    initial = models.initial(layout, 1)
    params = served_params(method, layout)
    served = making.Served("desk", "0f" * 32, method, method.hyper(**hyper), 1, params, initial)
    return making.whole(served, graph, stored="fp32", data=None, say=lambda line: None)


def test_a_fleet_whose_graph_has_no_steps_yet_gets_them_at_export(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def with_steps(graph: Graph, method: Any, *rest: Any) -> Graph:
        asked.append(method.name)
        return graph_of("fedper")

    monkeypatch.setattr(making, "with_steps", with_steps)
    made = whole_of(plain(), "fedper")
    assert (asked, made.manifest.adaptation) == (["fedper"], steps_of(METHODS["fedper"], METHODS["fedper"].hyper()))
    assert whole_of(graph_of("fedper"), "fedper").graph.adapt == made.graph.adapt
    assert asked == ["fedper"]


def test_a_method_that_must_not_step_has_no_steps_in_its_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot answer with fedper"):
        whole_of(graph_of("fedper"), "fedper", finetune_steps=0)
    made = whole_of(graph_of("pfldyn-maml"), "fedavg", finetune_steps=0)
    assert (made.graph.adapt, made.graph.info.adapt, made.manifest.adaptation) == (b"", None, None)
    device_bundle.write(tmp_path / "b", made)
    assert not (tmp_path / "b" / "adapt.onnx").exists()
    assert device_bundle.read(tmp_path / "b").manifest.graph.adapt is None


def test_a_bundle_that_is_not_sound_is_reported(run: Run, tmp_path: Path) -> None:
    device_bundle.write(tmp_path / "b", bundle_of("pfldyn-proto"))
    data = bytearray((tmp_path / "b" / "embed.onnx").read_bytes())
    data[-1] ^= 1
    (tmp_path / "b" / "embed.onnx").write_bytes(bytes(data))
    code, out, err = run("bundle", "verify", tmp_path / "b")
    assert (code, out) == (1, "")
    assert "embed.onnx has another sha256" in err


def test_where_there_is_no_torch_it_is_reported_that_nothing_was_compared(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_bundle.write(tmp_path / "b", bundle_of("fedper"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, _ = run("bundle", "verify", tmp_path / "b")
    assert (code, "not compared with torch, which is not installed" in out) == (0, True)
    assert json.loads(run("bundle", "verify", tmp_path / "b", "--json")[1])["torch"] is False
