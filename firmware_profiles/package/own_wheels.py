"""The user's own wheels (PEP 427), with a model or a method, that are installed on a board too."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import zipfile
from pathlib import Path

NAME = r"([A-Za-z0-9][\w.]*)-[\w.!+]+(-\d\w*)?-[\w.]+-[\w.]+-[\w.]+\.whl"
"""A wheel's file name: distribution, version, build, and the tags of Python, ABI and platform."""
MAX_ENTRY_POINTS = 1 << 20


def package(path: Path) -> str:
    """The normalized name of the distribution, from the file's name; empty if that is no wheel's name."""
    match = re.fullmatch(NAME, path.name)
    return re.sub(r"[-_.]+", "-", match[1]).lower() if match else ""


def problem(path: Path) -> str:
    """Why ``path`` cannot be installed on a board; empty if it can."""
    if not package(path):
        return "is not a wheel (python -m build makes one, as my_lab-1.0-py3-none-any.whl)"
    if not os.access(path, os.R_OK):
        return f"there is no file '{path}' that can be read"
    if package(path) == "metafleet":
        return "is the agent, which is always installed"
    try:
        with zipfile.ZipFile(path) as archive:
            has_metadata = any(name.endswith(".dist-info/METADATA") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        has_metadata = False
    return "" if has_metadata else f"'{path}' is not a valid wheel"


def holds(path: Path, module: str) -> bool:
    """Whether the wheel has the module with this dotted name."""
    inside = module.replace(".", "/")
    with zipfile.ZipFile(path) as archive:
        return any(name.startswith((f"{inside}/", f"{inside}.")) for name in archive.namelist())


def entry_points(path: Path, group: str) -> tuple[str, ...]:
    """The names of the wheel's entry points of ``group``."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith(".dist-info/entry_points.txt") and info.file_size <= MAX_ENTRY_POINTS:
                with contextlib.suppress(configparser.Error, UnicodeDecodeError):
                    parser.read_string(archive.read(info).decode())
    return tuple(parser[group]) if parser.has_section(group) else ()
