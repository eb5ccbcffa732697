"""Import rules, read from the syntax trees, so that no device or aggregator needs torch by accident."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

CORE = "fleet_core"
PACKAGES = (CORE, "edge_agent", "cloud_server", "export", "firmware_profiles")

# Rooms and files that may compose several packages: the operator's commands, the simulation, the demo and its baseline.
COMPOSERS = (
    "cloud_server/commands/", "cloud_server/devices/", "cloud_server/running/demo.py",
    "cloud_server/running/fedavg_baseline.py", "cloud_server/running/in_one_process.py",
)

# Rooms of files that are all of one kind, and named by what they are.
ALIKE = (
    "fleet_core/algorithms/methods", "fleet_core/data/readers", "fleet_core/data/partitions",
    "fleet_core/power/sensors",
)

# Heavy modules and the files (or folders, ending in a slash) that may import them.
TORCH_HOMES = ("fleet_core/learning/", "export/", "edge_agent/compute/trainer.py", "cloud_server/laboratory/")
HOMES = {
    "torch": TORCH_HOMES,
    "onnx": ("export/",),
    "onnxscript": ("export/",),
    "onnxruntime": ("export/", "fleet_core/backbone/onnx_runtime.py"),
    "paho": ("fleet_core/link/",),
    "matplotlib": ("cloud_server/laboratory/compare/comparison_charts.py",),
    "ray": ("cloud_server/laboratory/run/executors.py",),
    "starlette": ("cloud_server/console/",),
    "uvicorn": ("cloud_server/console/",),
    "yaml": ("firmware_profiles/image/first_boot.py",),
    "prometheus_client": ("cloud_server/integrations/prometheus.py",),
    "tensorboard": ("cloud_server/integrations/tracking.py",),
    "mlflow": ("cloud_server/integrations/tracking.py",),
    "dp_accounting": ("fleet_core/privacy/accountant.py",),
    "typer": ("cloud_server/commands/", "cloud_server/devices/", "cloud_server/choices/"),
    "rich": ("cloud_server/", "firmware_profiles/ssh/"),
}

# What a folder may import besides the standard library and fleet_core: at the top of a file, and inside functions.
BOUNDS = {
    "fleet_core/algorithms/": (set[str](), set[str]()),
    "fleet_core/data/": ({"numpy"}, {"numpy", "PIL"}),
    "fleet_core/training/": ({"numpy"}, {"numpy"}),
}

# Modules that must start without these, including everything that they import. Inside functions only COMPOSERS and the
# homes of torch may reach torch.
OPERATOR = {
    "torch", "onnx", "onnxscript", "matplotlib", "ray", "yaml", "starlette", "uvicorn", "tensorboard", "mlflow",
    "dp_accounting",
}  # fmt: skip
LIGHT = {
    "cloud_server.commands.cli": OPERATOR | {"numpy", "cryptography", "paho"},
    **dict.fromkeys(
        # Imported by the operator's commands when they run.
        (
            "cloud_server.running.aggregator_process", "cloud_server.identity.create_fleet",
            "cloud_server.devices.predict", "cloud_server.reports.html_report", "cloud_server.running.backup",
            "cloud_server.records.read_served_model", "cloud_server.choices.method_catalogue",
            "cloud_server.identity.token_enrolment", "cloud_server.devices.flash_over_ssh", "cloud_server.running.demo",
            "cloud_server.laboratory.compare.html_page", "cloud_server.laboratory.run.run_folder",
            "cloud_server.laboratory.run.run_progress", "firmware_profiles.image.card_image",
        ),
        OPERATOR,
    ),
    "edge_agent.commands.cli": {"torch", "onnx", "onnxscript", "numpy", "onnxruntime", "paho", "cryptography"},
    "edge_agent.http.serve": {"torch", "onnx", "onnxscript", "paho", "cryptography"},
    "edge_agent.inference.device_api": {"torch", "onnx", "onnxscript", "paho", "cryptography"},
    "fleet_core.power": {"torch"},
    "fleet_core.data": {"torch"},
    "fleet_core.training": {"torch", "onnx", "onnxruntime"},
    "fleet_core.algorithms": {"torch", "numpy"},
}


@dataclass(frozen=True)
class Import:
    """One imported name: ``import a.b`` and ``from a import b`` both give a.b."""

    file: str
    line: int
    name: str
    lazy: bool  # inside a function
    typing_only: bool  # under `if TYPE_CHECKING`

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: imports {self.name}"


class Tree:
    """The packages under ``root`` and their imports."""

    def __init__(self, root: Path):
        files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
        self.modules = {module_name(path.relative_to(root)): path.relative_to(root).as_posix() for path in files}
        self.imports = [found for path in files for found in imports_of(path, path.relative_to(root))]

    def files_of(self, name: str) -> set[str]:
        """The files that run when ``name`` is imported: its module and its parent packages."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return {self.modules[prefix] for prefix in prefixes if prefix in self.modules}

    def within(self, package: str) -> list[str]:
        """``package`` and everything below it."""
        return [module for module in self.modules if f"{module}.".startswith(f"{package}.")]

    def at_start(self, *modules: str) -> list[Import]:
        """All imports that run when ``modules`` are imported, transitively."""
        files, todo = set[str](), {file for module in modules for file in self.files_of(module)}
        while todo:
            files |= todo
            todo = {
                file
                for found in self.imports
                if found.file in todo and not found.lazy and not found.typing_only
                for file in self.files_of(found.name)
            } - files
        return [found for found in self.imports if found.file in files]


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, relative: Path) -> Iterator[Import]:
    package = module_name(relative.parent / "__init__").split(".")

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for name in names_in(node, package):
            yield Import(relative.as_posix(), getattr(node, "lineno", 0), name, lazy, typing_only)
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy, typing_only or child in guarded)

    yield from visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), False, False)


def names_in(node: ast.AST, package: list[str]) -> list[str]:
    """The absolute names that a statement or call imports."""
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module=module, names=aliases, level=level):
            base = [*(package[: len(package) - level + 1] if level else []), *(module.split(".") if module else [])]
            return [".".join([*base, alias.name]) for alias in aliases]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def allowed(file: str, places: Iterable[str]) -> bool:
    return any(file == place or (place.endswith("/") and file.startswith(place)) for place in places)


def wrong_layers(tree: Tree) -> list[str]:
    """fleet_core imports no other package; the others import fleet_core and not each other, except COMPOSERS."""
    return [
        str(found)
        for found in tree.imports
        if found.top in PACKAGES
        and found.top not in (CORE, found.file.partition("/")[0])
        and not allowed(found.file, COMPOSERS)
    ]


def circles(tree: Tree) -> list[list[str]]:
    """Import circles between rooms, including imports in functions and for annotations."""
    imports: dict[str, set[str]] = {}
    for found in tree.imports:
        files = tree.files_of(found.name)
        if files:
            here, there = (file.rpartition("/")[0] for file in (found.file, max(files, key=len)))
            imports.setdefault(here, set()).update({there} - {here})
    reached: dict[str, set[str]] = {}
    for room in imports:
        todo, seen = [room], set[str]()
        while todo:
            fresh = imports.get(todo.pop(), set()) - seen
            seen |= fresh
            todo += fresh
        reached[room] = seen
    return sorted([room, *sorted(reached[room] - {room})] for room in reached if room in reached[room])


def away_from_home(tree: Tree) -> list[str]:
    """Heavy modules that are imported outside their homes, also inside functions."""
    return [
        str(found)
        for found in tree.imports
        if found.top in HOMES and not found.typing_only and not allowed(found.file, HOMES[found.top])
    ]


def out_of_bounds(tree: Tree) -> list[str]:
    """Imports in the folders of BOUNDS that BOUNDS does not allow."""
    return [
        str(found)
        for folder, (at_top, in_functions) in BOUNDS.items()
        for found in tree.imports
        if found.file.startswith(folder)
        and not found.typing_only
        and found.top not in {CORE, *sys.stdlib_module_names, *(in_functions if found.lazy else at_top)}
    ]


def heavy_at_start(tree: Tree, module: str, heavy: set[str]) -> list[str]:
    """Imports of ``heavy`` when ``module`` is imported, and functions outside COMPOSERS that reach torch."""
    found_here = tree.at_start(*tree.within(module))
    return [
        *(str(found) for found in found_here if found.top in heavy and not found.lazy and not found.typing_only),
        *(
            f"{found}, which imports torch, inside a function"
            for found in found_here
            if found.lazy and not allowed(found.file, (*COMPOSERS, *TORCH_HOMES))
            if any(deeper.top == "torch" and not deeper.lazy for deeper in tree.at_start(found.name))
        ),
    ]


@pytest.fixture(scope="module")
def product() -> Tree:
    return Tree(ROOT)


def test_every_package_is_read(product: Tree) -> None:
    assert {found.file.partition("/")[0] for found in product.imports} >= {CORE, "edge_agent", "cloud_server", "export"}
    assert [module for module in LIGHT if not product.within(module)] == []


def test_packages_keep_to_their_layers(product: Tree) -> None:
    assert wrong_layers(product) == []


def test_no_rooms_import_each_other_in_a_circle(product: Tree) -> None:
    assert circles(product) == []


def test_every_room_says_what_it_is_for(product: Tree) -> None:
    rooms = {file.rpartition("/")[0] for file in product.modules.values()}
    short = [room for room in rooms if not (ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())))]
    assert short == []


def test_every_room_names_its_files(product: Tree) -> None:
    missing = []
    for file in product.modules.values():
        room, _, name = file.rpartition("/")
        said = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
        if name != "__init__.py" and room not in ALIKE and not re.search(rf"\b{name.removesuffix('.py')}\b", said):
            missing.append(file)
    assert missing == []


def test_heavy_modules_are_imported_at_home_only(product: Tree) -> None:
    assert away_from_home(product) == []


def test_algorithms_and_data_import_no_more_than_they_may(product: Tree) -> None:
    assert out_of_bounds(product) == []


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_start_without_the_heavy_ones(product: Tree, module: str) -> None:
    assert heavy_at_start(product, module, LIGHT[module]) == []


# The checks themselves, on small trees that each break one rule.


def tree_of(root: Path, files: dict[str, str]) -> Tree:
    """A tree of {"folder/module": text}."""
    for name, text in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


@pytest.mark.parametrize(
    "statement",
    [
        "import edge_agent.state",
        "from edge_agent import state",
        "def f():\n    from edge_agent.state import load",
        "from importlib import import_module\nstate = import_module('edge_agent.state')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import edge_agent",
    ],
)
@pytest.mark.parametrize("module", ["fleet_core/errors", "export/graph", "cloud_server/coordinator"])
def test_a_package_that_imports_its_neighbour_is_found(tmp_path: Path, module: str, statement: str) -> None:
    assert len(wrong_layers(tree_of(tmp_path, {module: statement}))) == 1


def test_composers_and_the_core_may_be_crossed(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        {
            "cloud_server/commands/cli": "import export.bundle, edge_agent",
            "edge_agent/state": "from fleet_core import errors\nfrom . import loop\nfrom .loop import turn",
        },
    )
    assert len(tree.imports) == 5
    assert wrong_layers(tree) == []


def test_a_circle_of_rooms_is_found(tmp_path: Path) -> None:
    files = {"fleet_core/a/one": "def f():\n    from fleet_core.b import two",
             "fleet_core/b/two": "import fleet_core.c.three",
             "fleet_core/c/three": "from fleet_core.a.one import f", "fleet_core/d/four": "import fleet_core.a.one"}
    assert [found[0] for found in circles(tree_of(tmp_path, files))] == ["fleet_core/a", "fleet_core/b", "fleet_core/c"]


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("edge_agent/loop", "import torch.nn"),
        ("edge_agent/loop", "def f():\n    import torch"),
        ("edge_agent/trainer", "import onnx"),
        ("cloud_server/coordinator", "import onnxruntime"),
        ("fleet_core/messages", "from paho.mqtt import client"),
        ("fleet_core/learning_rates", "import torch"),
    ],
)
def test_a_heavy_module_away_from_home_is_found(tmp_path: Path, module: str, statement: str) -> None:
    assert len(away_from_home(tree_of(tmp_path, {module: statement}))) == 1


def test_heavy_modules_at_home_and_in_annotations_pass(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path,
        {
            "fleet_core/learning/models": "import torch",
            "edge_agent/compute/trainer": "import torch",
            "fleet_core/backbone/onnx_runtime": "import onnxruntime",
            "fleet_core/link/mqtt": "import paho.mqtt.client",
            "fleet_core/layout": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        },
    )
    assert len(tree.imports) == 6
    assert away_from_home(tree) == []


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("fleet_core/algorithms/dyn", "import numpy as np"),
        ("fleet_core/algorithms/dyn", "def f():\n    import numpy"),
        ("fleet_core/data/csv", "import pandas"),
        ("fleet_core/data/images", "from PIL import Image"),
    ],
)
def test_an_import_out_of_bounds_is_found(tmp_path: Path, module: str, statement: str) -> None:
    assert len(out_of_bounds(tree_of(tmp_path, {module: statement}))) == 1


def test_data_may_import_numpy_and_pillow_inside_a_function(tmp_path: Path) -> None:
    text = "import csv\nimport numpy\nfrom fleet_core.errors import DataError\ndef f():\n    from PIL import Image"
    tree = tree_of(tmp_path, {"fleet_core/data/images": text})
    assert len(tree.imports) == 4
    assert out_of_bounds(tree) == []


@pytest.mark.parametrize(
    "files",
    [
        {"cloud_server/cli": "import fleet_core.learning.models"},
        {"cloud_server/cli": "from cloud_server import rounds", "cloud_server/rounds": "import fleet_core.learning"},
        {"cloud_server/cli": "from .rounds import a", "cloud_server/rounds": "from fleet_core.learning import b"},
        {"cloud_server/cli": "import cloud_server.deep.er", "cloud_server/deep/__init__": "import torch"},
        {"cloud_server/cli": "class A:\n    import fleet_core.learning.models"},
        {"cloud_server/cli": "from . import rounds", "cloud_server/rounds": "def f():\n    import fleet_core.learning"},
    ],
)
def test_torch_is_found_however_far_away(tmp_path: Path, files: dict[str, str]) -> None:
    learning = {"fleet_core/learning/__init__": "from . import models", "fleet_core/learning/models": "import torch"}
    assert heavy_at_start(tree_of(tmp_path, learning | files), "cloud_server.cli", {"torch"})


def test_a_function_of_the_command_line_may_reach_torch(tmp_path: Path) -> None:
    files = {"cloud_server/commands/cli": "def init():\n    import export.graph", "export/graph": "import torch"}
    tree = tree_of(tmp_path, files)
    assert heavy_at_start(tree, "cloud_server.commands.cli", {"torch"}) == []


@pytest.mark.slow
def test_help_of_every_operators_command_imports_nothing_heavy():
    program = """
import contextlib, io, sys
import typer
from cloud_server.commands.cli import app

def paths(group, before=()):
    for name, command in group.commands.items():
        yield (*before, name)
        yield from paths(command, (*before, name)) if hasattr(command, "commands") else ()

shown = [(), *paths(typer.main.get_command(app))]
for path in shown:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        app([*path, "--help"])
print(len(shown), *{"numpy", "cryptography", "paho", "torch", "onnxruntime"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    count, *heavy = done.stdout.split()
    assert int(count) > 25, done.stderr
    assert heavy == []


@pytest.mark.parametrize(
    "start", ["from fleet_core.backbone import onnx_runtime as s; s.runtime()", "import export.gate"]
)
def test_onnxruntimes_telemetry_is_disabled_before_it_is_imported(start):
    program = f"""
import os, sys
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print(os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Look())
{start}
"""
    environ = {key: value for key, value in os.environ.items() if key not in ("CI", "ORT_DISABLE_TELEMETRY")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, env=environ
    )
    assert done.stdout.split() == ["1"], done.stderr
