"""A frozen backbone from the command line: make, show, init, train, export, install, answer; and simulate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from cloud_server.commands import start
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import in_one_process
from edge_agent.commands import cli as device_cli
from fleet_core.base import config
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import Samples, save
from tests.support import backbones
from tests.support.cli import Run, runner


@pytest.fixture
def run(monkeypatch, capsys) -> Run:
    return runner(monkeypatch, capsys, "metafleet", start.main)


@pytest.fixture
def agent(monkeypatch, capsys) -> Run:
    return runner(monkeypatch, capsys, "edge-agent", device_cli.main)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An ONNX file and samples of two clients."""
    onnx.save(backbones.model(), tmp_path / "small.onnx")
    parts = [backbones.samples(k) for k in range(2)]
    x, y, time = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y", "time"))
    client = np.repeat(["p", "q"], len(parts[0]))
    save(tmp_path / "all.npz", Samples(x, y, client, time, parts[0].classes))
    return tmp_path


def test_a_backbone_is_made_and_shown(run, place):
    made = run("backbone", "make", place / "small.onnx", "--to", place / "b.safetensors", "--output", "act",
               "--int8", place / "all.npz", "--json")
    facts = json.loads(made.out)
    assert made.code == 0, made.err
    assert (facts["width"], facts["output"]) == (backbones.WIDTH, "act")
    assert 0 < facts["int8"] < 0.25
    shown = run("backbone", "show", place / "b.safetensors")
    assert "int8" in shown.out
    assert facts["id"] in shown.out
    assert "GlobalAveragePool" in run("backbone", "show", place / "small.onnx").out


@pytest.mark.parametrize(("arguments", "text"), [
    (["--output", "pooledd"], "did you mean 'pooled'"),
    (["--mean", "a,b"], "expected numbers with commas"),
    (["--mean", "0.5"], "one per channel"),
])
def test_wrong_options_are_said(run, place, arguments, text):
    made = run("backbone", "make", place / "small.onnx", "--to", place / "b.safetensors", *arguments)
    assert made.code == 2
    assert text in made.err
    assert not (place / "b.safetensors").exists()


def test_init_without_a_backbone_refuses_its_options(run, place):
    made = run("init", place / "f", "--data", place / "all.npz", "--backbone-output", "act")
    assert made.code == 2
    assert "give --backbone" in made.err


@pytest.mark.slow
def test_a_fleet_with_a_backbone_from_init_to_an_installed_bundle(run, agent, place):
    made = run("init", place / "f", "--data", place / "all.npz", "--backbone", place / "small.onnx", "--model", "mlp",
               "--rounds", 1, "--backbone-int8")
    assert made.code == 0, made.err
    fleet = Fleet.load(place / "f")
    model = fleet.config.model
    assert model.backbone is not None
    assert (model.backbone.name, model.sample.shape, model.input.shape) == ("small.onnx", backbones.SHAPE, (6,))
    assert run("init", place / "f").code == 0  # complete already
    homes = [write_device_folder(fleet, name, place / name, "mqtt://127.0.0.1:1883").parent for name in ("p", "q")]
    for k, home in enumerate(homes):
        save(home / "samples.npz", backbones.samples(k))
    in_one_process.run(fleet, {home.name: (home, settings_of(home)) for home in homes})

    assert run("export", place / "f", "--to", place / "m.bundle", "--int8", place / "all.npz").code == 0
    assert run("bundle", "verify", place / "m.bundle").code == 0
    (place / "new").mkdir()
    save(place / "new" / "samples.npz", backbones.samples(9))
    installed = agent("install", place / "m.bundle", "--home", place / "new")
    assert installed.code == 0, installed.err
    np.save(place / "x.npy", backbones.samples(5).x)
    answered = agent("predict", place / "x.npy", "--home", place / "new", "--json")
    wanted = ["abc"[y] for y in backbones.samples(5).y]
    assert np.mean([a == b for a, b in zip(json.loads(answered.out)["labels"], wanted, strict=True)]) > 0.9
    told = agent("doctor", "--home", place / "new")
    assert "CPUExecutionProvider" in told.out

    again = run("backbone", "make", place / "f", "--to", place / "again.safetensors")
    assert "no encoder of raw samples" in again.err


def test_an_experiment_runs_on_features(place):
    backbones.write(place / "b.safetensors")
    tables = {
        "data": {"path": str(place / "all.npz"),
                                                "backbone": str(place / "b.safetensors"), "limit": 100},
        "model": {"name": "mlp"}, "partition": {"kind": "natural"}, "budget": {"rounds": 1},
    }
    path = place / "e.toml"
    path.write_text(config.toml(tables) + '[[method]]\nname = "fedavg"\n')
    found = workload.build(experiments.load(path, []))
    assert found.samples.x.shape == (100, backbones.WIDTH)
    assert found.spec.shape == (backbones.WIDTH,)
    assert (place / "b.features").exists()
