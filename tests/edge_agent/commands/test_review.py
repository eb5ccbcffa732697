"""``edge-agent review``: what it lists, how it draws a sample, and how it takes a label."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_agent import Device
from edge_agent.commands import cli, review
from tests.support import homes
from tests.support.cli import Run, runner, typing

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("METAFLEET_HOME", raising=False)
    return runner(monkeypatch, capsys, "edge-agent", cli.main)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    homes.service_with_model(homes.home(tmp_path / "d"), "fedavg")
    return tmp_path / "d"


@pytest.mark.slow
def test_it_lists_and_labels_without_a_terminal(run: Run, home: Path) -> None:
    assert "no unlabelled samples" in run("review", "--home", home).out
    name = Device(home).add(X, time=0.0)
    listed = json.loads(run("review", "--home", home, "--json").out)
    assert [(one["id"], one["time"], sorted(one["probabilities"])) for one in listed] == [(name, 0.0, ["a", "b", "c"])]
    assert name in run("review", "--home", home).out
    assert f"{name} is b" in run("review", "--home", home, "--id", name, "--label", "b").out
    assert json.loads(run("review", "--home", home, "--json").out) == []


def test_what_does_not_go_is_said(run: Run, home: Path) -> None:
    assert "belong together" in run("review", "--home", home, "--label", "b").err
    refused = run("review", "--home", home, "--id", "0" * 24, "--label", "b")
    assert refused.code != 0
    assert "no unlabelled sample" in refused.err


def test_on_a_terminal_it_asks_for_each_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Device(home)
    for k in range(3):
        device.add(X + k)
    typing(monkeypatch, "", "goose", "b")
    review.review(home, 20, None, None, new_class=False, as_json=False)
    out = capsys.readouterr().out
    assert "1 of 3" in out
    assert "unknown class 'goose'" in out
    assert "1 labelled" in out
    assert len(device.unlabelled()) == 2


def test_a_sample_is_drawn_channel_by_channel() -> None:
    assert review.drawn(X) == ["▁▂▃▄▅▆▇█  0 to 7"]
    assert review.drawn(np.zeros((2, 4), np.float32)) == ["▁▁▁▁  0 to 0"] * 2
    wide = review.drawn(np.arange(1200.0).reshape(6, 200))
    assert len(wide) == review.CHANNELS
    assert len(wide[0].split()[0]) == review.COLUMNS
