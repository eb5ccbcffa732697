"""Code in the docs type-checks and its imports exist, the method of seam.md runs on a fleet, and methods.md agrees with
the code."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from cloud_server.choices import method_catalogue
from cloud_server.choices.first_settings import load_data
from export.first_model import first
from fleet_core.algorithms.interface import LocalSgd, Payload, descend
from fleet_core.algorithms.methods.average import AverageClient
from fleet_core.algorithms.methods.registry import METHODS, PRODUCT
from fleet_core.base import storage, trees
from fleet_core.base.errors import ConfigError
from fleet_core.data import model_input
from fleet_core.data.model_input import TOKENS
from fleet_core.learning import models
from fleet_core.learning.architectures import MODELS
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec
from tests.support.inprocess import config_text, toy, without_fsync, world
from tests.support.paths import ROOT
from tests.support.quadratics import SIZE, quadratics, tree, vector
from tests.support.world_checks import finished, settled, statuses

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(page: Path) -> str:
    """The page's Python blocks at their own line numbers, so that an error names the page's line."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block[1].splitlines()):
            lines[start + offset] = line
    return "\n".join(lines).rstrip() + "\n"


PAGES = {page.stem: source for page in sorted((ROOT / "docs").glob("**/*.md")) if (source := code(page)).strip()}
METHODS_PAGE = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def test_there_is_code_to_check() -> None:
    assert "class DittoClient(" in PAGES["seam"]
    assert "ditto" not in PRODUCT, "then it is no example of how to add one"


@pytest.mark.slow
def test_the_blocks_of_every_page_type_check_strictly(tmp_path: Path) -> None:
    files = []
    for name, source in PAGES.items():
        files.append(tmp_path / f"docs_{name.replace('-', '_')}.py")
        files[-1].write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_the_imports_of_every_page_exist(name: str) -> None:
    nodes = ast.walk(ast.parse(PAGES[name]))
    imports: list[ast.stmt] = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), name, "exec"), {})


def test_the_file_of_samples_that_is_shown_makes_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PAGES["samples"], "samples.md", "exec"), {})
    samples, spec = load_data("samples.npz")
    assert (samples.clients, samples.classes, spec.shape) == (("pump-1", "pump-2"), ("off", "on"), (3, 128))
    assert model_input.remarks(samples.x) == []


def test_the_windows_that_are_shown_are_the_same_in_every_form(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "samples.md").read_text(encoding="utf-8")
    wide, long = re.findall(r"^```csv\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    whole, rows = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = {"wide.csv": wide, "readings.csv": long, "whole.ndjson": whole, "rows.jsonl": rows}
    for name, content in shown.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    expected, _ = load_data(str(tmp_path / "wide.csv"))
    assert expected.x.shape == (2, 2, 3)
    for name, count in (("readings.csv", 2), ("whole.ndjson", 2), ("rows.jsonl", 1)):
        found, spec = load_data(str(tmp_path / name), window=None if name == "whole.ndjson" else 3)
        assert spec.shape == (2, 3)
        assert found.clients == ("pump-1",)
        np.testing.assert_array_equal(found.x, expected.x[:count])
        np.testing.assert_array_equal(found.time, np.array([0.04, 0.10])[:count])


def test_the_page_of_models_has_all_of_them_with_their_sizes_and_options() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    lines = [line.strip("|") for line in text.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert sorted(row[0].strip("`") for row in rows) == sorted(MODELS)
    for name, _, example, parameters, embedding, options, _ in rows:
        *shape, classes = map(int, re.findall(r"\d+", example))
        kind = "int64" if name.strip("`") in TOKENS else "float32"
        layout = models.describe(name.strip("`"), InputSpec(tuple(shape), kind), [str(k) for k in range(classes)], {})
        assert (f"{layout.parameters(('body', 'head')):,}", str(layout.embedding)) == (parameters, embedding), name
        known = list(inspect.signature(MODELS[name.strip("`")]).parameters)[2:]
        assert re.findall(r"`(\w+)`", options) == known, name


@pytest.mark.slow
def test_the_users_own_model_on_the_page_becomes_a_fleet_with_steps_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("models_page")
    exec(compile(PAGES["models"], "models.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "models_page", module)
    lines: list[str] = []
    method = METHODS["per-fedavg-fo"]
    data, _ = first("models_page:Dilated", InputSpec((2, 24)), ("off", "on"), {"width": 8}, head=True, seed=0,
                    method=method, hyper=method.hyper(), say=lines.append)
    graph = graph_bundle.unpack(data)
    assert graph.info.adapt is not None
    assert graph.layout.embedding == 8
    with pytest.raises(ConfigError, match="has no option 'wdith'"):
        models.describe("models_page:Dilated", InputSpec((2, 24)), ("off", "on"), {"wdith": 8})
    headless = re.sub(r"\n +self\.head = .*", "", PAGES["models"])
    exec(compile(headless, "models.md", "exec"), module.__dict__)
    with pytest.raises(ConfigError, match="per-fedavg-fo trains the head of a model, and 'models_page:Dilated' has"):
        first("models_page:Dilated", InputSpec((2, 24)), ("off", "on"), {"width": 8}, head=True, seed=0,
              method=method, hyper=method.hyper())


READ = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("**/*.md")])
PLACES = ("metafleet|fleet_core|edge_agent|cloud_server|export|firmware_profiles|tests|scripts|docs|benchmarks|"
          "requirements")


@pytest.mark.parametrize("path", sorted({
    found for page in READ
    for found in re.findall(rf"`((?:{PLACES})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    if not found.endswith("ditto.py")
}))
def test_a_file_that_the_documentation_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes for the page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"),
                                             flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not link.startswith("http") and (
            not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
        ):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_item_of_a_list_begins_a_line(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^.*[.:;)`] (?:\*(?: [A-Z`*\[].*)?|[2-9]\. [A-Z].*)$", text, re.MULTILINE) == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)\s]+)\)", index))


# The method of seam.md ------------------------------------------------------------------------------------------------

DEVICES = quadratics(8, seed=0, mu=0.5, smoothness=8.0)
EXACT: dict[str, Any] = {"local_steps": 10, "client_lr": 1 / 8, "clip_norm": 0.0}


@pytest.fixture(scope="module")
def page() -> Any:
    """The module made of seam.md's code blocks."""
    module = ModuleType("seam_page")
    sys.modules["seam_page"] = module  # dataclasses look their module up
    exec(compile(PAGES["seam"], "docs/seam.md", "exec"), module.__dict__)
    return module


def run(rule: Any, hyper: Any, groups: Any, state: Any = None) -> tuple[Payload, Any]:
    """One round of device-0 starting from ``groups``."""
    steps = [DEVICES["device-0"].gradient] * hyper.local_steps
    return rule.run(Payload(groups, {"round": 1.0}), state or rule.init(groups, {}, hyper), steps, hyper)


def test_ditto_without_pull_trains_alone_beside_federated_averaging(page: Any) -> None:
    anchor, alone = tree(np.ones(SIZE)), tree(np.full(SIZE, -2.0))
    plain, _ = run(AverageClient(), LocalSgd(**EXACT), anchor)
    for pull in (0.0, 3.0):
        update, state = run(page.DittoClient(), page.Ditto(**EXACT, pull=pull), anchor, {"personal": alone})
        assert vector(update.groups).tobytes() == vector(plain.groups).tobytes()
        expected = descend(alone, [DEVICES["device-0"].gradient] * 10, LocalSgd(**EXACT), EXACT["client_lr"])
        assert np.array_equal(vector(state["personal"]), vector(expected)) == (pull == 0)


def test_dittos_own_model_ends_between_the_devices_minimum_and_the_fleets_model(page: Any) -> None:
    anchor, pull = np.ones(SIZE), 2.0
    state: Any = None
    hyper = page.Ditto(local_steps=50, client_lr=0.1, clip_norm=0.0, pull=pull)
    for _ in range(4):
        _, state = run(page.DittoClient(), hyper, tree(anchor), state)
    loss = DEVICES["device-0"]
    closed = np.linalg.solve(loss.hessian + pull * np.eye(SIZE), loss.hessian @ loss.minimum + pull * anchor)
    np.testing.assert_allclose(vector(state["personal"]), closed, atol=1e-12)


@pytest.fixture
def in_the_product(page: Any) -> Iterator[None]:
    """seam.md's method is registered as ``fedavg``, and nothing waits for the disk."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRODUCT, "fedavg", replace(page.DITTO, name="fedavg"))
        without_fsync(patch)
        yield
    torch.set_num_threads(before)


def test_ditto_runs_on_a_fleet_whose_devices_answer_with_their_own_models(in_the_product: None, tmp_path: Path) -> None:
    w = world(tmp_path, config_text("fedavg", rounds=4, hyper="pull = 0.5\nclient_lr = 0.3"))
    w.start_server()
    for n in range(3):
        w.start_agent(f"d{n}", toy(n, shift=float(n)))
    assert w.pump(lambda: finished(w) and settled(w))
    assert statuses(w, 4) == dict.fromkeys(("d0", "d1", "d2"), "counted")
    assert [row.models_transmitted for row in w.server.ledger.rounds()] == [6.0] * 4
    for name, agent in w.agents.items():
        slots = agent.service.slots
        own = storage.unflatten(storage.unpack(slots.path(slots.pointer().slot, "personal").read_bytes())[0])
        state = next(agent.home.folder.glob("methods/*/state.safetensors"))
        kept = {k: a for k, a in storage.unpack(state.read_bytes())[0].items() if k.startswith("personal/")}
        assert storage.flatten_roles({"personal": own}).keys() == kept.keys()
        assert all(np.array_equal(kept[f"personal/{key}"], a) for key, a in storage.flatten(own).items()), name
        assert trees.norm(trees.subtract(own, slots.weights().params)) > 0.01
        assert agent.service.personalization == "own"
    w.close()


# The methods of methods.md --------------------------------------------------------------------------------------------

SECTIONS = dict(re.findall(r"^### `([\w-]+)`\n(.*?)(?=^### |\Z)", METHODS_PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_of_methods_has_a_row_and_a_section_for_each_and_no_other() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", METHODS_PAGE, re.MULTILINE)
    assert rows == list(SECTIONS) == list(PRODUCT)


@pytest.mark.parametrize("name", PRODUCT)
def test_the_page_of_methods_says_what_the_code_does(name: str) -> None:
    method = METHODS[name]
    cells = (f"`{name}`", method_catalogue.transfer_text(method, "down"), method_catalogue.transfer_text(method, "up"),
             ", ".join(method_catalogue.stays(method)) or "nothing", method_catalogue.without_torch(method))
    assert f"\n| {' | '.join(cells)} |\n" in METHODS_PAGE
    source, *points = SECTIONS[name].split("\n* ")
    assert " ".join(source.split()) == method.source
    assert [point.partition(" ")[0] for point in points] == ["Deviations:", "Take"]


@pytest.mark.parametrize("name", PRODUCT)
def test_a_hyper_parameter_that_the_page_of_methods_names_is_one(name: str) -> None:
    settings = METHODS[name].hyper.__dataclass_fields__
    named = re.findall(r"`(\w+)(?: = [^`]*)?`", SECTIONS[name])
    assert set(named) - set(METHODS) <= set(settings)
