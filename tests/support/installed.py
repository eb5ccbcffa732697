"""Small programs that stand in for those of a board, first in PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def program(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, shell: str) -> Path:
    """Puts a shell script of this name into PATH; its arguments are written to ``NAME.arguments`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/{name}.arguments\n{shell}\n')
    path.chmod(0o755)
    if str(folder) not in os.environ["PATH"].split(os.pathsep):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder / f"{name}.arguments"
