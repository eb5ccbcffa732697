"""Run a command line in the test's process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Ran(NamedTuple):
    """The result of one command."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def typing(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Somebody at a terminal types these lines, then Ctrl-D."""
    typed = iter(lines)

    def answer(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answer)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)


def runner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, main: Callable[[], object]
) -> Run:
    """A function that runs ``program`` with arguments through its ``main``."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return Ran(int(code or 0), printed.out, printed.err)

    return run
