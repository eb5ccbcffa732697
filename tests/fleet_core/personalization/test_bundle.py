"""A bundle on disk, as a folder and as one file: read back, and refused when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_agent.inference import bundle_check
from export import gate
from export.full_bundle import Served, whole
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import BundleError, ConfigError
from fleet_core.learning import models
from fleet_core.model import golden_arrays
from fleet_core.personalization import bundle_format, device_bundle
from fleet_core.personalization.bundle_format import Bundle
from fleet_core.personalization.gradient_steps import steps_of
from tests.support.bundles import CLASSES, KEY, LAYOUT, bundle_of, graph_of, served_params

FORMS = ("folder", "one.bundle")
KINDS = {"metasgd": ("fedmeta-metasgd", "fp32", False), "fedper": ("fedper", "fp16", False),
         "proto": ("pfldyn-proto", "fp32", True)}  # fmt: skip


def made(name: str) -> Bundle:
    method, stored, int8 = KINDS[name]
    return bundle_of(method, stored=stored, int8=int8)


def same(left: Any, right: Any) -> bool:
    flat, other = storage.flatten(left), storage.flatten(right)
    return list(flat) == list(other) and all(np.array_equal(flat[key], other[key]) for key in flat)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_a_bundle_is_read_as_it_was_written(tmp_path: Path, name: str, form: str) -> None:
    device_bundle.write(tmp_path / form, made(name))
    again = device_bundle.read(tmp_path / form)
    wanted = made(name)
    assert (again.graph.graphs, again.graph.adapt, again.int8) == (
        wanted.graph.graphs, wanted.graph.adapt, wanted.int8
    )  # fmt: skip
    assert same(again.params, wanted.params)
    assert same(again.graph.first, wanted.graph.first)
    assert again.hyper == wanted.hyper
    assert again.manifest.model == wanted.manifest.model
    for key, array in wanted.graph.golden.items():
        np.testing.assert_array_equal(again.graph.golden[key], array)


ANSWERING = sorted(METHODS.keys() - {"fedproto"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERING)
def test_every_method_that_answers_without_training_has_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method = METHODS[name]
    monkeypatch.setattr(gate, "check", lambda graph, network: None)  # other tests compare them with torch
    served = Served("desk", KEY, method, method.hyper(), 1, served_params(method, LAYOUT), models.initial(LAYOUT, 1))
    wanted = whole(served, graph_of(name), stored="fp32", data=None, say=lambda line: None)
    device_bundle.write(tmp_path / "b", wanted)
    again = device_bundle.read(tmp_path / "b")
    assert again.hyper == method.hyper()
    assert again.manifest.adaptation == steps_of(method, method.hyper())
    assert same(again.params, wanted.params)
    assert same(again.graph.first, wanted.graph.first)
    assert bundle_check.check(again).onnxruntime


def test_a_folder_holds_the_files_that_are_named_and_nothing_else(tmp_path: Path) -> None:
    for name in KINDS:
        device_bundle.write(tmp_path / name, made(name))
    always = {"manifest.json", "weights.safetensors", "golden.npz", "embed.onnx", "predict.onnx"}
    found = {name: {path.name for path in (tmp_path / name).iterdir()} for name in KINDS}
    assert found["metasgd"] == always | {"adapt.onnx", "rates.safetensors"}
    assert found["fedper"] == always | {"adapt.onnx"}
    assert found["proto"] == always | {"embed-int8.onnx"}
    assert {path.name for path in tmp_path.iterdir()} == set(KINDS)


def test_the_manifest_says_what_a_person_wants_to_know(tmp_path: Path) -> None:
    device_bundle.write(tmp_path / "b", made("fedper"))
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert (manifest["fleet"], manifest["key"], manifest["method"]["name"]) == ("desk", KEY, "fedper")
    assert manifest["layout"]["model"] == "mlp"
    assert manifest["layout"]["input"]["shape"] == [8]
    assert manifest["layout"]["input"]["dtype"] == "float32"
    assert manifest["layout"]["input"]["mean"] == [0.1] * 8
    assert tuple(manifest["layout"]["classes"]) == CLASSES
    assert manifest["layout_hash"] == LAYOUT.hash
    assert (manifest["model"]["round"], manifest["model"]["stored"]) == (7, "fp16")
    hyper = METHODS["fedper"].hyper()
    steps = {"groups": ["head"], "rates": False, "lr": hyper.finetune_lr, "number": hyper.finetune_steps}
    assert manifest["adaptation"] == steps
    assert (manifest["graph"]["ir_version"], manifest["graph"]["opset"]) == (10, 18)
    assert manifest["graph"]["min_onnxruntime"] == "1.23.2"
    assert {"atol", "rtol", "seed"} <= manifest["graph"].keys()
    for name, info in manifest["files"].items():
        data = (tmp_path / "b" / name).read_bytes()
        assert info == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["files"].keys() == {path.name for path in (tmp_path / "b").iterdir()} - {"manifest.json"}


def test_a_folder_and_one_file_have_the_same_bytes_each_time(tmp_path: Path) -> None:
    for form in ("a", "b", "a.bundle", "b.bundle"):
        device_bundle.write(tmp_path / form, made("metasgd"))
    assert (tmp_path / "a.bundle").read_bytes() == (tmp_path / "b.bundle").read_bytes()
    arrays, _ = storage.unpack((tmp_path / "a.bundle").read_bytes())
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()
    }


def test_half_precision_takes_half_the_place_and_names_the_weights_as_they_are_read(tmp_path: Path) -> None:
    full, half = bundle_of("fedper"), made("fedper")
    assert full.manifest.model.id != half.manifest.model.id
    device_bundle.write(tmp_path / "half", half)
    arrays, _ = storage.unpack((tmp_path / "half" / "weights.safetensors").read_bytes())
    assert {str(array.dtype) for array in arrays.values()} == {"float16"}
    for key, array in storage.flatten(full.params).items():
        rounded = storage.flatten(half.params)[key]
        np.testing.assert_array_equal(rounded, array.astype(np.float16).astype(np.float32))
        assert rounded.dtype == np.float32


def test_what_half_precision_does_not_hold_is_refused() -> None:
    with pytest.raises(BundleError, match=r"head/w.*float16.*\nhint: .*fp32"):
        device_bundle.as_stored({"head": {"w": np.array([7e4], np.float32)}}, "fp16")
    rates = {"rates": {"head.w": np.array([1e-9], np.float32)}}
    assert same(device_bundle.as_stored(rates, "fp16"), rates)


# What is there already, and what fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_replaced(tmp_path: Path, form: str) -> None:
    device_bundle.write(tmp_path / form, made("fedper"))
    with pytest.raises(ConfigError, match="exists already"):
        device_bundle.write(tmp_path / form, made("metasgd"))
    assert device_bundle.read(tmp_path / form).manifest.method.name == "fedper"


@pytest.mark.parametrize("form", FORMS)
def test_a_bundle_that_fails_its_check_is_not_written(tmp_path: Path, form: str) -> None:
    def refuse(place: Path) -> None:
        assert device_bundle.read(place).manifest.fleet == "desk"
        raise BundleError("not this one")

    with pytest.raises(BundleError, match="not this one"):
        device_bundle.write(tmp_path / form, made("proto"), check=refuse)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from fleet_core.personalization import device_bundle
source, to = map(Path, sys.argv[1:])
device_bundle.write(to, device_bundle.read(source), check=lambda place: (print("here", flush=True), sys.stdin.read()))
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that writes the bundle of this name and waits before finishing until its input ends."""
    device_bundle.write(tmp_path / "source", made("proto"))
    begun: list[subprocess.Popen[str]] = []

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(tmp_path / "source"), str(tmp_path / name)]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        stdout = begun[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "here\n"
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_a_killed_export_left_is_deleted_by_the_next_and_nothing_else_is(
    tmp_path: Path, writer: Callable[[str], subprocess.Popen[str]], form: str
) -> None:
    killed, at_work = writer(form), writer("other")
    killed.kill()
    killed.wait()
    (left,) = tmp_path.glob(f".{form}.*")
    assert (left / form).exists()
    of_another = {tmp_path / f".{form}.abcdefgh", tmp_path / f".{form}.kept"}
    for folder in of_another:
        folder.mkdir()
        (folder / "notes").write_text("a person's")
    device_bundle.write(tmp_path / form, made("proto"))
    assert not left.exists()
    assert all((folder / "notes").exists() for folder in of_another)
    at_work.communicate("")
    assert at_work.returncode == 0
    device_bundle.read(tmp_path / "other")
    hidden = {path for path in tmp_path.iterdir() if path.name.startswith(".")}
    assert hidden == of_another


def test_an_export_at_work_keeps_its_folder_while_another_writes_the_same_name(
    tmp_path: Path, writer: Callable[[str], subprocess.Popen[str]]
) -> None:
    at_work = writer("b")
    (folder,) = tmp_path.glob(".b.*")
    with pytest.raises(RuntimeError, match="stop"):
        device_bundle.write(tmp_path / "b", made("proto"), check=stopping)
    assert (folder / "b").exists()
    at_work.communicate("")
    assert at_work.returncode == 0
    device_bundle.read(tmp_path / "b")
    assert {path.name for path in tmp_path.iterdir()} == {"b", "source"}


def stopping(place: Path) -> None:
    raise RuntimeError("stop")


# Malformed ------------------------------------------------------------------------------------------------------------

Files = dict[str, bytes]


def files_of(name: str, tmp_path: Path) -> Files:
    place = tmp_path / f"whole-{name}"
    device_bundle.write(place, made(name))
    return {path.name: path.read_bytes() for path in place.iterdir()}


def signed(files: Files, **changes: Any) -> Files:
    """The files with a correct list of hashes in the manifest, and with ``changes`` to it."""
    manifest = json.loads(files["manifest.json"]) | changes
    rest = {name: data for name, data in files.items() if name != "manifest.json"}
    manifest["files"] = {n: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in rest.items()}
    return {"manifest.json": json.dumps(manifest).encode(), **rest}


def edit(files: Files, *path: str, value: Any) -> Files:
    """The files with one value in the manifest replaced."""
    whole = json.loads(files["manifest.json"])
    at = whole
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return {**files, "manifest.json": json.dumps(whole).encode()}


def zipped(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def without(files: Files, name: str) -> Files:
    return {key: data for key, data in files.items() if key != name}


def weights(files: Files, edit: Callable[[dict[str, Any]], dict[str, Any]], name: str = "weights.safetensors") -> Files:
    arrays, _ = storage.unpack(files[name])
    return signed({**files, name: storage.pack(edit(dict(arrays)))})


def negated(arrays: dict[str, Any]) -> dict[str, Any]:
    return {key: -array for key, array in arrays.items()}


def widened(arrays: dict[str, Any]) -> dict[str, Any]:
    return {key: array.astype(np.float64) for key, array in arrays.items()}


def fewer(arrays: dict[str, Any]) -> dict[str, Any]:
    return dict(list(arrays.items())[1:])


def wrong(files: Files) -> dict[str, tuple[Files, str]]:
    arrays = golden_arrays.unpack(files["golden.npz"], "")
    return {
        "no manifest": (without(files, "manifest.json"), "has no manifest.json"),
        "a file too many": ({**files, "run.sh": b"#!"}, "holds run.sh"),
        "one that is not listed": ({**files, "embed-int8.onnx": b"x"}, "embed-int8.onnx is not listed"),
        "one that does not belong": (signed({**files, "embed-int8.onnx": b"x"}), "does not belong here"),
        "no graph": (without(files, "predict.onnx"), "predict.onnx is missing"),
        "no steps": (signed(without(files, "adapt.onnx")), "adapt.onnx is missing"),
        "no rates": (signed(without(files, "rates.safetensors")), "rates.safetensors is missing"),
        "a bit turned": ({**files, "embed.onnx": b"\x09" + files["embed.onnx"][1:]}, "embed.onnx has another sha256"),
        "cut": ({**files, "golden.npz": files["golden.npz"][:-1]}, "golden.npz has .* bytes, expected"),
        "a manifest of no JSON": ({**files, "manifest.json": b"{"}, "is not JSON"),
        "a deep one": ({**files, "manifest.json": b"[" * 100_000}, "is not JSON"),
        "a list": ({**files, "manifest.json": b"[]"}, "is malformed"),
        "of a newer metafleet": (edit(files, "format", value=2), "a newer metafleet made it"),
        "an unknown key": (edit(files, "extra", value=1), "extra: unknown key"),
        "another layout's hash": (edit(files, "layout_hash", value="0" * 16), "its layout has the hash"),
        "an unknown method": (edit(files, "method", "name", value="fedmeta-metasdg"), "did you mean 'fedmeta-metasgd'"),
        "another version": (edit(files, "method", "version", value=99), "version 99"),
        "no hyper-parameters": (edit(files, "method", "hyper", value={"local_steps": -1}), "hyper-parameters are mal"),
        "a path for a file": (edit(files, "files", value={"../x": {"size": 1, "sha256": "0" * 64}}), "is missing"),
        "other steps": (edit(files, "adaptation", "groups", value=["head"]), "is not that of adapt.onnx"),
        "no steps told": (edit(files, "adaptation", value=None), "is not that of adapt.onnx"),
        "another model": (weights(files, negated), "the weights are"),
        "weights in float64": (weights(files, widened), "is float64"),
        "too few weights": (weights(files, fewer), "none"),
        "weights not finite": (weights(files, lambda a: {k: v * np.nan for k, v in a.items()}), "not finite"),
        "too few rates": (weights(files, fewer, "rates.safetensors"), "none"),
        "no safetensors": (signed({**files, "weights.safetensors": b"12345678"}), "is not safetensors"),
        "an empty graph": (signed({**files, "embed.onnx": b""}), "files"),
        "no archive": (signed({**files, "golden.npz": b"PK"}), r"is not an \.npz"),
        "compressed": (signed({**files, "golden.npz": zipped(**arrays)}), "not compressed"),
        "of other samples": (
            signed({**files, "golden.npz": golden_arrays.pack({**arrays, "x": arrays["x"][:, :2]})}), "golden x"
        ),
    }  # fmt: skip


def place(files: Files, path: Path) -> Path:
    if path.suffix:
        path.write_bytes(storage.pack({name: np.frombuffer(data, np.uint8) for name, data in files.items()}))
        return path
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_malformed_bundle_is_refused_with_its_fault(tmp_path: Path, form: str) -> None:
    files = files_of("metasgd", tmp_path)
    device_bundle.read(place(signed(files), tmp_path / f"sound-{form}"))
    for number, (fault, (broken, complaint)) in enumerate(wrong(files).items()):
        with pytest.raises(BundleError, match=complaint):
            pytest.fail(f"{fault}: {device_bundle.read(place(broken, tmp_path / f'{number}-{form}'))}")


def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no bundle")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "manifest.json").mkdir()
    floats = storage.pack({"manifest.json": np.zeros(3, np.float32)})
    (tmp_path / "floats.bundle").write_bytes(floats)
    for name in ("absent", "text", "empty", "folder", "floats.bundle"):
        with pytest.raises(BundleError, match=name):
            device_bundle.read(tmp_path / name)


def test_a_file_over_its_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form in FORMS:
        device_bundle.write(tmp_path / form, made("fedper"))
        monkeypatch.setattr(device_bundle, "LIMITS", {**bundle_format.LIMITS, "golden.npz": 10})
        with pytest.raises(BundleError, match=r"golden\.npz"):
            device_bundle.read(tmp_path / form)
        monkeypatch.undo()


def test_a_golden_file_takes_no_more_memory_than_it_has_bytes() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.npy", b"0" * 1000)
    data = bytearray(buffer.getvalue())
    at = data.rindex(b"PK\x01\x02")
    data[at + 20 : at + 28] = (1 << 31).to_bytes(4, "little") * 2  # the sizes of the entry in the directory
    with pytest.raises(BundleError):
        golden_arrays.unpack(bytes(data), "golden")
    for dtype in (object, np.float64, "<U3", ">f4"):
        with pytest.raises(BundleError):
            golden_arrays.unpack(zipped_plain(np.zeros(3, dtype)), "golden")
    with pytest.raises(BundleError):
        golden_arrays.unpack(zipped_plain(np.asfortranarray(np.zeros((2, 3), np.float32))), "golden")


def zipped_plain(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, x=array)
    return buffer.getvalue()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_changed_bytes_are_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Reading a file with changed bytes gives a bundle or a BundleError, nothing else."""
    path = tmp_path / "turned.bundle"
    if not (tmp_path / "whole.bundle").exists():
        device_bundle.write(tmp_path / "whole.bundle", made("fedper"))
    whole = bytearray((tmp_path / "whole.bundle").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole))
    with contextlib.suppress(BundleError):
        device_bundle.read(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_golden_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    whole = bytearray(golden_arrays.pack({"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.arange(2)}))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BundleError):
        golden_arrays.unpack(bytes(whole), "golden")
