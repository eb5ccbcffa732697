"""Wheels of the user's own, which come along to a board with a model or a method (PEP 427)."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import zipfile
from pathlib import Path

NAME = r"([A-Za-z0-9][\w.]*)-[\w.!+]+(-\d\w*)?-[\w.]+-[\w.]+-[\w.]+\.whl"
"""Distribution, version, build, and the tags of Python, ABI and platform."""
MAX_ENTRY_POINTS = 1 << 20


def package(path: Path) -> str:
    """The distribution that the file's name tells, as indexes spell it; empty where it is no wheel's name."""
    named = re.fullmatch(NAME, path.name)
    return re.sub(r"[-_.]+", "-", named[1]).lower() if named else ""


def wrong(path: Path) -> str:
    """Why ``path`` cannot come along; empty where it can."""
    if not package(path):
        return "is no wheel (python -m build makes one, as my_lab-1.0-py3-none-any.whl)"
    if not os.access(path, os.R_OK):
        return f"there is no file '{path}' that can be read"
    if package(path) == "metafleet":
        return "is the agent, which comes along by itself"
    try:
        with zipfile.ZipFile(path) as archive:
            whole = any(name.endswith(".dist-info/METADATA") for name in archive.namelist())
    except (zipfile.BadZipFile, OSError):
        whole = False
    return "" if whole else f"'{path}' is no file of a wheel"


def holds(path: Path, module: str) -> bool:
    """Whether the wheel has the module, by its name with dots."""
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
