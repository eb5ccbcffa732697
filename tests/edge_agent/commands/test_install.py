"""Installing a bundle on a device: it is checked, then it answers without a broker; one that fails changes nothing."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import cli as device_cli
from fleet_core.base import trees
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import Samples, save
from fleet_core.model import payloads
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import SIGNED_AS, Bundle
from fleet_core.protocol.signing import Signer, key_id
from tests.support.bundles import CLASSES, KEY, SIGNER, bundle_of, samples
from tests.support.cli import Run, runner

STRANGER = Signer(b"\x01" * 32)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("METAFLEET_HOME", raising=False)
    return runner(monkeypatch, capsys, "edge-agent", device_cli.main)


def written(folder: Path, made: Bundle, name: str = "b.bundle", signer: Signer | None = SIGNER) -> Path:
    device_bundle.write(folder / name, made, signer=signer)
    return folder / name


def home_with(folder: Path, recorded: Samples | None = None) -> Path:
    folder.mkdir()
    save(folder / "samples.npz", recorded or samples(60))
    return folder


def held(home: Path) -> dict[str, bytes]:
    """Every file of a home except the locks."""
    return {str(p.relative_to(home)): p.read_bytes() for p in sorted(home.rglob("*")) if p.is_file() and p.suffix}


def with_params(made: Bundle, params: Any, round_number: int) -> Bundle:
    model = replace(made.manifest.model, id=payloads.identity(params), round=round_number)
    return replace(made, params=params, manifest=replace(made.manifest, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["b", "b.bundle"])
@pytest.mark.parametrize(
    ("method", "how"), [("pfldyn-proto", "proto"), ("fedmeta-metasgd", "meta-sgd"), ("fedper", "own")]
)
def test_a_new_device_answers_from_a_bundle_alone(
    run: Run, tmp_path: Path, method: str, how: str, form: str
) -> None:
    home, np_input = home_with(tmp_path / "d1"), tmp_path / "x.npy"
    path = written(tmp_path, bundle_of(method), form)
    code, out, err = run("install", path, "--home", home, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["round"], result["personalized"]["how"], result["left"]) == (7, how, "")
    assert result["personalized"]["samples"] == 36
    settings = settings_of(home)
    assert (settings.device.name, settings.device.fleet, settings.device.key) == ("d1", "desk", KEY)
    np.save(np_input, np.eye(3, 8, dtype=np.float32) * 3)
    code, out, _ = run("predict", np_input, "--home", home, "--json")
    answer = json.loads(out)
    assert (code, answer["round"], answer["personalization"]) == (0, 7, how)
    if method == "pfldyn-proto":
        assert tuple(answer["labels"]) == CLASSES
    assert run("personalize", "--home", home)[0] == 0
    assert json.loads(run("predict", np_input, "--home", home, "--json")[1]) == answer


@pytest.mark.slow
def test_a_device_without_samples_says_that_it_needs_them(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "d1"
    code, out, err = run("install", written(tmp_path, bundle_of("pfldyn-proto")), "--home", home)
    assert (code, err) == (0, "")
    assert "not personalized: " in out
    assert "there are no samples yet" in out
    np.save(tmp_path / "a.npy", np.eye(3, 8, dtype=np.float32)[:1] * 3)
    np.save(tmp_path / "b.npy", np.eye(3, 8, dtype=np.float32)[1:2] * 3)
    refused = run("samples", "add", tmp_path / "a.npy", "--home", home)
    assert "the samples have no class; expected --label CLASS" in refused.err
    refused = run("samples", "add", tmp_path / "a.npy", "--target", "1.5", "--home", home)
    assert "this fleet has classes, not numbers to predict; expected --label CLASS" in refused.err
    for name in ("a", "b"):
        assert run("samples", "add", tmp_path / f"{name}.npy", "--label", name, "--home", home)[0] == 0
    assert run("personalize", "--home", home)[0] == 0
    assert json.loads(run("predict", tmp_path / "b.npy", "--home", home, "--json")[1])["labels"] == ["b"]


@pytest.mark.slow
def test_the_next_bundle_replaces_the_last(run: Run, tmp_path: Path) -> None:
    made, home = bundle_of("pfldyn-proto"), home_with(tmp_path / "d1")
    later = with_params(made, trees.apply(lambda a: a * np.float32(1.5), made.params), 9)
    for number, which in enumerate((made, later)):
        code, out, err = run("install", written(tmp_path, which, f"{number}.bundle"), "--home", home, "--json")
        assert (code, err) == (0, "")
    assert json.loads(out)["held_back"]["before"] is not None
    status = json.loads(run("status", "--home", home, "--json")[1])
    assert status["serve"] == {"round": 9, "id": later.manifest.model.id}


# What is refused ------------------------------------------------------------------------------------------------------


def broken(made: Bundle) -> dict[str, Callable[[Path], None]]:
    """Ways to damage a bundle in a folder."""

    def turned(folder: Path) -> None:
        data = bytearray((folder / "embed.onnx").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "embed.onnx").write_bytes(bytes(data))

    return {
        "a bit turned": turned,
        "a file gone": lambda folder: (folder / "weights.safetensors").unlink(),
        "a file more": lambda folder: (folder / "install.sh").write_text("#!/bin/sh"),
        "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    }


def wrong_numbers(made: Bundle) -> Bundle:
    """Its hashes are correct, but its graphs do not give its golden outputs."""
    golden = {**made.graph.golden, "embed": made.graph.golden["embed"] + np.float32(0.5)}
    return replace(made, graph=replace(made.graph, golden=golden))


@pytest.mark.slow
@pytest.mark.parametrize("known", [False, True])
def test_a_failing_bundle_is_refused_and_nothing_changes_on_the_disk(run: Run, tmp_path: Path, known: bool) -> None:
    made, home = bundle_of("pfldyn-proto"), tmp_path / "d1"
    if known:
        assert run("install", written(tmp_path, made, "sound"), "--home", home_with(home))[0] == 0
    before = held(home)
    places = {"wrong numbers": written(tmp_path, wrong_numbers(made), "wrong"), "nothing there": tmp_path / "none"}
    for number, (fault, spoil) in enumerate(broken(made).items()):
        places[fault] = written(tmp_path, made, f"spoiled-{number}")
        spoil(places[fault])
    for fault, place in places.items():
        code, out, err = run("install", place, "--home", home)
        assert (code, out, err.startswith("error: ")) == (1, "", True), fault
        assert held(home) == before, fault
        assert home.exists() == known


def test_what_the_fleets_key_did_not_sign_is_refused_and_nothing_changes(run: Run, tmp_path: Path) -> None:
    made, home = bundle_of("pfldyn-proto"), home_with(tmp_path / "d1")
    assert run("install", written(tmp_path, made, "good"), "--home", home)[0] == 0
    good, before = tmp_path / "good", held(home)

    def changed(name: str, change: Callable[[Path], object]) -> Path:
        folder = Path(shutil.copytree(good, tmp_path / name))
        change(folder)
        return folder

    def renamed(folder: Path) -> None:
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"round": 7', '"round": 8'))

    def other_weights(folder: Path) -> None:
        """Other weights, with a manifest that lists them and the signature of the former one."""
        more = written(tmp_path, with_params(made, trees.scale(made.params, 2.0), 7), "more", None)
        for name in ("manifest.json", "weights.safetensors"):
            shutil.copy(more / name, folder / name)

    def of_a_stranger(folder: Path) -> None:
        """A stranger's key and signature, and weights that must not be parsed."""
        own = written(tmp_path, replace(made, manifest=replace(made.manifest, key=STRANGER.public)), "own", STRANGER)
        for name in ("manifest.json", "manifest.sig"):
            shutil.copy(own / name, folder / name)
        (folder / "weights.safetensors").write_bytes(b"\xff" * 100)

    def in_its_name(folder: Path) -> None:
        line = STRANGER.sign(SIGNED_AS + (folder / "manifest.json").read_bytes()).partition(b"\n")[0]
        (folder / "manifest.sig").write_bytes(line + b"\n")

    def as_a_round(folder: Path) -> None:
        """The fleet's own signature of the same bytes, for another purpose."""
        line = SIGNER.sign((folder / "manifest.json").read_bytes()).partition(b"\n")[0]
        (folder / "manifest.sig").write_bytes(line + b"\n")

    cases: dict[Path, str] = {
        changed("renamed", renamed): "its signature does not match",
        changed("weights", other_weights): "its signature does not match",
        changed("stranger", of_a_stranger): "is a device of another fleet",
        changed("name", in_its_name): f"its signature is signed by key {key_id(STRANGER.public)}",
        changed("purpose", as_a_round): "its signature does not match",
        changed("none", lambda folder: (folder / "manifest.sig").unlink()): "has no manifest.sig",
        changed("empty", lambda folder: (folder / "manifest.sig").write_bytes(b"\n")): "carries no Ed25519 signature",
    }
    for path, complaint in cases.items():
        code, out, err = run("install", path, "--home", home)
        assert (code != 0, out, complaint in err) == (True, "", True), err
        assert held(home) == before
        if path.name != "none":
            assert run("install", path, "--home", home, "--unsigned")[0] != 0, "a wrong signature is none"
    assert run("install", tmp_path / "none", "--home", home, "--unsigned")[0] == 0


def test_a_folder_of_another_fleet_or_device_is_refused(run: Run, tmp_path: Path) -> None:
    made, home = bundle_of("pfldyn-proto"), home_with(tmp_path / "d1")
    path = written(tmp_path, made)
    assert run("install", path, "--home", home)[0] == 0
    own = replace(made, manifest=replace(made.manifest, key=STRANGER.public))
    other_key = written(tmp_path, own, "key.bundle", STRANGER)
    other_fleet = written(tmp_path, replace(made, manifest=replace(made.manifest, fleet="barn")), "fleet.bundle")
    (tmp_path / "operator").mkdir()
    (tmp_path / "operator" / "fleet.toml").write_text("")
    before = held(home)
    cases = {
        ("install", other_key, "--home", home): "is a device of another fleet, 'desk'",
        ("install", other_fleet, "--home", home): "is a device of another fleet, 'desk'; expected 'barn'",
        ("install", path, "--home", home, "--name", "d2"): "is the device 'd1'; expected 'd2'",
        ("install", path, "--home", tmp_path / "operator"): "is a fleet's own folder",
        ("install", path, "--home", tmp_path / "a b"): "'a b' is not a valid device name",
    }
    for arguments, complaint in cases.items():
        code, out, err = run(*arguments)
        assert (code, out, complaint in err) == (2, "", True), err
    assert held(home) == before
    assert not (tmp_path / "a b").exists()
    assert run("install", path, "--home", tmp_path / "a b", "--name", "a-b")[0] == 0


def test_install_is_refused_while_an_agent_runs(run: Run, tmp_path: Path) -> None:
    home, path = home_with(tmp_path / "d1"), written(tmp_path, bundle_of("pfldyn-proto"))
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = held(home)
        code, _, err = run("install", path, "--home", home)
        assert (code, "an agent is running here" in err) == (1, True)
        assert held(home) == before
    assert run("install", path, "--home", home)[0] == 0


def test_a_model_that_answers_the_held_back_samples_much_worse_is_rolled_back(run: Run, tmp_path: Path) -> None:
    made, home = bundle_of("pfldyn-proto"), home_with(tmp_path / "d1")
    blind = with_params(made, trees.apply(np.zeros_like, made.params), 9)
    assert run("install", written(tmp_path, made), "--home", home)[0] == 0
    np.save(tmp_path / "x.npy", np.eye(3, 8, dtype=np.float32) * 3)
    answer = run("predict", tmp_path / "x.npy", "--home", home, "--json")[1]
    code, _, err = run("install", written(tmp_path, blind, "blind.bundle"), "--home", home)
    assert (code, "before: the device keeps its former model" in err) == (1, True), err
    assert run("predict", tmp_path / "x.npy", "--home", home, "--json")[1] == answer
    status = json.loads(run("status", "--home", home, "--json")[1])
    assert (status["serve"]["round"], status["rolled_back"]["round"]) == (7, 9)
