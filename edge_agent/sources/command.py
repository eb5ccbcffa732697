"""Programs that print: readings in lines of text, or bytes for other sources."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from edge_agent.sources.interface import Item, Pace
from edge_agent.sources.text_lines import TextLines
from fleet_core.base.errors import SourceError
from fleet_core.board.source_settings import CommandSource

READ_BYTES = 1 << 16
END_S = 2.0
"""Time that a program has to end when it is asked to."""
MAX_SAID = 400


class Program:
    """A running program. Raises SourceError if it cannot be started. hint: what to do then."""

    def __init__(self, command: Sequence[str], folder: Path, hint: str | None = None):
        try:
            self._process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                bufsize=0, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise SourceError(f"cannot be started: {getattr(error, 'strerror', None) or error}", where=command[0],
                              expected="a program that is installed, or a path", hint=hint) from error
        self._name, self._hint = command[0], hint
        self._pace, self._said = Pace(), b""
        out, err = self._process.stdout, self._process.stderr
        assert out is not None
        assert err is not None
        self._out, self._err = out, err
        self._selector = selectors.PollSelector()
        for stream in (out, err):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)

    def read(self, timeout_s: float) -> bytes | None:
        """What it printed, perhaps nothing; None when it has ended well. Raises SourceError when it failed."""
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, READ_BYTES)
            if not data:
                self._selector.unregister(key.fileobj)
            elif key.fileobj is self._err:
                self._said = (self._said + data)[-MAX_SAID:]
            else:
                self._pace.came(len(data))
                return data
        if self._out not in {key.fileobj for key in self._selector.get_map().values()}:
            self._check_end()
            return None
        return b""

    def close(self) -> None:
        """Ends the program and those that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                break
        self._selector.close()
        self._out.close()
        self._err.close()

    def _check_end(self) -> None:
        """Raises SourceError unless it ended well."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        code = self._process.returncode
        if code == 0:
            return
        with contextlib.suppress(OSError, ValueError):
            self._said = (self._said + (os.read(self._err.fileno(), READ_BYTES) or b""))[-MAX_SAID:]
        last = self._said.decode("utf-8", "replace").strip().splitlines()[-1:]
        how = ("closed its output and runs on" if code is None else f"ended with exit code {code}" if code > 0
               else f"ended by {signal.Signals(-code).name}")
        raise SourceError(how + (f": {last[0]}" if last else ""), where=self._name, hint=self._hint)


class CommandFeed:
    """Readings that a program prints. folder: in which it runs."""

    def __init__(self, source: CommandSource, folder: Path):
        self._program = Program(source.command, folder)
        self._text = TextLines(source.columns)

    def read(self, timeout_s: float) -> list[Item] | None:
        data = self._program.read(timeout_s)
        if data is None:
            return self._text.last() or None
        return self._text.more(data)

    def close(self) -> None:
        self._program.close()
