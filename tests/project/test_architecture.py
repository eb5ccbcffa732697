"""docs/architecture.md: its pictures show every room, match the imports, and are what the committed script draws."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.project.test_imports import PACKAGES, Tree
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("draw_architecture")
    finally:
        sys.path.pop(0)


def room_of(file: str) -> str:
    """A file's package, as a dotted name."""
    return file.rpartition("/")[0].replace("/", ".")


def rooms() -> set[str]:
    """The sub-packages that hold modules."""
    files = {file.relative_to(ROOT).as_posix() for package in PACKAGES for file in (ROOT / package).rglob("*.py")
             if file.name != "__init__.py"}
    return {room_of(file) for file in files} - set(PACKAGES)


def drawn(script: ModuleType) -> dict[str, tuple[str, int]]:
    """{room: (package, row)}; row 0 is at the top."""
    return {f"{package}.{room}": (package, row) for package, rows in script.ROOMS.items()
            for row, names in enumerate(rows) for room, _ in names}


def test_the_picture_has_every_room_and_no_other(script: ModuleType) -> None:
    assert set(script.ROOMS) == set(PACKAGES)
    assert set(drawn(script)) == rooms()


def test_the_rooms_stand_above_those_that_they_import(script: ModuleType) -> None:
    tree, at = Tree(ROOT), drawn(script)
    wrong = []
    for found in tree.imports:
        here, there = room_of(found.file), room_of(max(tree.files_of(found.name), key=len, default=""))
        if here in at and there in at and here != there and at[here][0] == at[there][0] and at[here][1] >= at[there][1]:
            wrong.append(str(found))
    assert wrong == []


def test_the_rooms_that_import_torch_are_marked(script: ModuleType) -> None:
    importing = {room_of(found.file) for found in Tree(ROOT).imports if found.top == "torch" and not found.typing_only}
    assert importing == script.TORCH | {"export"}


@pytest.mark.parametrize("name", ["architecture-parts.svg", "architecture-round.svg"])
def test_a_picture_is_what_the_script_draws_and_is_shown(script: ModuleType, name: str) -> None:
    kept = (DOCS / name).read_text(encoding="utf-8")
    assert kept == script.PICTURES[name](), "python3 scripts/draw_architecture.py"
    ElementTree.fromstring(kept)
    assert f"({name})" in PAGE


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w.]+/[\w./-]*)`", PAGE)
    assert len(named) > 60
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_function_that_the_page_names_beside_a_file_is_in_it() -> None:
    named = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", PAGE)
    assert len(named) > 15
    missing = [(file, name) for file, names in named for name in re.findall(r"`(?:\w+\.)?(\w+)`", names)
               if f"def {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
    assert missing == []
