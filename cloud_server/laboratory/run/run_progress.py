"""Progress of an experiment on stderr: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cloud_server.figures.formatting import plain_text, seconds_text, share_text
from cloud_server.figures.live_display import Display
from cloud_server.figures.scores import ACCURACY, FIGURES

SHOWN_RUNS = 16
LINE_EVERY_S = 10.0
DRAW_EVERY_S = 0.25


@dataclass(frozen=True)
class _Last:
    """A run's last round. evaluated: (number, accuracy or what is in its place) of the last evaluated round."""

    round: int
    loss: float
    evaluated: tuple[int, str] | None

    @property
    def accuracy(self) -> str:
        if self.evaluated is None:
            return ""
        number, text = self.evaluated
        return text if number == self.round else f"{text} in round {number}"


class Progress(Display):
    """Shows the rounds of several runs as they end. Use it as a context manager.

    runs: those not yet ended. rounds: the maximum of each run. Plain lines, also used on a terminal with NO_COLOR, show
    every evaluated round, and other rounds of a run at most every ten seconds.
    """

    def __init__(self, runs: Sequence[str], rounds: int, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):
        super().__init__(stream)
        self._left, self._rounds, self._clock = dict.fromkeys(runs, rounds), rounds, clock
        self._last: dict[str, _Last] = {}
        self._line_at: dict[str, float] = {}
        self._first_s: float | None = None
        self._rounds_timed, self._drawn_s = 0, 0.0
        self._measure = ACCURACY.name

    def _finish(self) -> None:
        if self._live:
            self._live.update(self.table(), refresh=True)

    def round_ended(self, run: str, row: Mapping[str, Any]) -> None:
        """Shows a round of ``run``. row: its figures."""
        now, number = self._clock(), int(row["round"])
        if self._first_s is None:
            self._first_s = now
        else:
            self._rounds_timed += 1
        evaluated = None
        figure = next((one for key, one in FIGURES.items() if key in row), None)
        if figure is not None:
            mean = row[figure.key]["mean"]
            self._measure, evaluated = figure.name, (number, share_text(mean) if figure == ACCURACY else f"{mean:.3f}")
        self._left[run] = self._rounds - number
        self._last[run] = _Last(
            number, row["loss"], evaluated or (self._last[run].evaluated if run in self._last else None)
        )
        if self._live:
            if now - self._drawn_s >= DRAW_EVERY_S:
                self._live.update(self.table(), refresh=True)
                self._drawn_s = now
        elif evaluated or now - self._line_at.get(run, -LINE_EVERY_S) >= LINE_EVERY_S:
            self._line_at[run] = now
            self.say(self.line(run))

    def line(self, run: str) -> str:
        """The state of a run in one line."""
        last = self._last[run]
        parts = [run, f"round {last.round:>{len(str(self._rounds))}}/{self._rounds}", f"loss {last.loss:.3f}"]
        accuracy = f"{self._measure} {last.accuracy}" if last.evaluated else ""
        return "  ".join([*parts, *filter(None, [accuracy, self.remaining()])])

    def table(self) -> Group:
        """The number of ended runs, and a table of the running ones."""
        ended = sum(not left for left in self._left.values())
        head = "  ".join(filter(None, [f"{ended} of {len(self._left)} runs ended", self.remaining()]))
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        for name in ("run", "round", "loss", self._measure):
            table.add_column(name, justify="left" if name == "run" else "right")
        under_way = [run for run in self._last if self._left[run]]
        if not under_way:
            return Group(Text(head, style="bold"))
        for run in under_way[:SHOWN_RUNS]:
            last = self._last[run]
            cells = (plain_text(run), f"{last.round}/{self._rounds}", f"{last.loss:.3f}", last.accuracy)
            table.add_row(*map(Text, cells))
        if len(under_way) > SHOWN_RUNS:
            table.add_row(Text(f"and {len(under_way) - SHOWN_RUNS} more", style="dim"))
        return Group(Text(head, style="bold"), table)

    def remaining(self) -> str:
        """The remaining time from the pace of all runs so far. A budget of bytes or joules may end them earlier."""
        left = sum(self._left.values())
        if not self._rounds_timed or self._first_s is None or not left:
            return ""
        return f"about {seconds_text(left * (self._clock() - self._first_s) / self._rounds_timed)} left"
