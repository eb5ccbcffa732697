"""The live view of a running fleet (a table on a terminal, else one plain line per round), and the closing table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cloud_server.figures.formatting import (
    ABSENT,
    absent_text,
    bytes_text,
    joules_text,
    missing_text,
    phase_text,
    plain_text,
    seconds_text,
    share_text,
    spread_text,
    stage_text,
    traffic_text,
)
from cloud_server.figures.live_display import Display
from cloud_server.figures.scores import Score, TaskScore
from cloud_server.ledger import ledger_tables as tables
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes, Joules
from cloud_server.ledger.ledger_tables import Evaluation, TaskEvaluation
from cloud_server.reports import array_tables, codec_tables, cost_tables
from cloud_server.results.result import Result, RoundFigures, Sums, latest_of_task, round_figures, task_score
from fleet_core.power.meter import WORKING

SHOWN_DEVICES = 20
REST = 20
"""How many times as long as it took to read a snapshot nothing is read."""
RECENT_ROUNDS = 5  # the remaining time is estimated from these
TOTAL_ROWS = (("payload", "payload_bytes"), ("MQTT", "mqtt_bytes"), ("wire", "wire_bytes"))


@dataclass(frozen=True)
class DeviceLine:
    """The state of a device. accuracy, or task: its last evaluation. payload: over its whole life."""

    name: str
    phase: str
    accuracy: float | None = None
    payload: Bytes | None = None
    energy: Joules | None = None
    new: bool = False
    task: TaskScore | None = None


@dataclass(frozen=True)
class Snapshot:
    """The state of a fleet. open_round: its open round with ``received`` of ``cohort`` updates, or None."""

    rounds: tuple[RoundFigures, ...] = ()
    devices: tuple[DeviceLine, ...] = ()
    open_round: int | None = None
    received: int = 0
    cohort: int = 0


def snapshot(ledger: Ledger, after: int = -1) -> Snapshot:
    """Reads all devices and the rounds of ``_rounds``. This is slow in a large fleet: wait ``REST`` times as long."""
    volume, joules = ledger.volume("device"), ledger.joules("device")
    accuracy = {row.device: row.accuracy for row in ledger.latest(Evaluation, stage="after")}
    predicted = {name: stages.get("after", stages.get("before")) for name, stages in latest_of_task(ledger).items()}
    devices = tuple(
        DeviceLine(
            name=d.name, phase=phase_of(d), accuracy=accuracy.get(d.name), energy=joules.get(d.name), new=d.new,
            payload=volume[d.name].payload if d.name in volume else None,
            task=task_score([row] if (row := predicted.get(d.name)) is not None else []),
        )
        for d in ledger.devices()
        if d.status == "enrolled"
    )  # fmt: skip
    running = ledger.rounds("open")[-1:]
    received = sum(len(ledger.rows(tables.Update, round=r.round, status="counted")) for r in running)
    return Snapshot(
        rounds=_rounds(ledger, after), devices=devices, open_round=running[0].round if running else None,
        received=received, cohort=len(running[0].cohort) if running else 0,
    )  # fmt: skip


def _rounds(ledger: Ledger, after: int) -> tuple[RoundFigures, ...]:
    """The closed rounds after ``after``, the recent ones for the pace, and the last evaluated one."""
    last = ledger.newest(tables.Round, status="closed")
    newest = [ledger.newest(Evaluation, stage="after", new=False), ledger.newest(TaskEvaluation, new=False)]
    evaluated = max((number for number in newest if number is not None), default=None)
    if last is None:
        return ()
    first = min(after, last - RECENT_ROUNDS) + 1
    alone = range(0) if evaluated is None or evaluated >= first else range(evaluated, evaluated + 1)
    return *round_figures(ledger, alone), *round_figures(ledger, range(first, last + 1))


class LiveView(Display):
    """Shows snapshots on ``stream`` (stderr): a table on a terminal, else one plain line per closed round.

    NO_COLOR also gives plain lines. Use it as a context manager.

    after_round: rounds up to this one are not shown again. settle_s: delay of a plain line, unless the next round
    closes earlier, so that it includes what devices report after the close. """

    def __init__(
        self, total_rounds: int, stream: TextIO | None = None, *, after_round: int = -1, settle_s: float = 2.0
    ):
        super().__init__(stream)
        self.total_rounds = total_rounds
        self._told = after_round
        self._settle_s = settle_s
        self._seen: dict[int, float] = {}
        self._untold: list[RoundFigures] = []

    def _finish(self) -> None:
        for closed in self._untold:
            if closed.round > self._told:
                self._tell(closed)

    @property
    def told(self) -> int:
        """The last round that was shown."""
        return self._told

    def update(self, now: Snapshot) -> None:
        """Shows ``now``; as plain lines only the newly closed rounds."""
        if self._live:
            self._live.update(self.table(now), refresh=True)
            self._told = max([closed.round for closed in now.rounds], default=self._told)
            return
        self._untold = [closed for closed in now.rounds if closed.round > self._told]
        for closed in self._untold:
            seen_s = self._seen.setdefault(closed.round, time.monotonic())
            if closed is not self._untold[-1] or time.monotonic() - seen_s >= self._settle_s:
                self._tell(closed)

    def _tell(self, closed: RoundFigures) -> None:
        self.say(round_line(closed, self.total_rounds))
        self._told = closed.round
        self._seen.pop(closed.round, None)

    def table(self, now: Snapshot) -> Group:
        """Progress, the last figures and the devices."""
        shown = now.devices[:SHOWN_DEVICES]
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        table.add_column("device")
        table.add_column("now")
        measure = next((device.task.head for device in shown if device.task is not None), "accuracy")
        for heading in (measure, "up", "down", "energy"):
            table.add_column(heading, justify="right")
        for device in shown:
            table.add_row(*map(Text, _device_cells(device)))
        hidden = len(now.devices) - len(shown)
        return Group(self._progress(now), Text(""), table, Text(f"and {hidden} more" if hidden else "", style="dim"))

    def _progress(self, now: Snapshot) -> Group:
        last = now.rounds[-1] if now.rounds else None
        done = last.round if last else 0
        bar = ProgressBar(total=max(self.total_rounds, 1), completed=done, width=28)
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_row(Text(f"round {done}/{self.total_rounds}", style="bold"), bar, Text(self._remaining(now)))
        in_flight = f"round {now.open_round} in flight: {now.received}/{now.cohort} updates"
        lines = [in_flight if now.open_round is not None else "no round in flight"]
        lines.append("  ".join(_figures(last)) if last else "no round closed yet")
        evaluated = next((r for r in reversed(now.rounds) if r.accuracy or r.task), None)
        if evaluated and evaluated is not last:
            lines.append(f"{_accuracy(evaluated)} after round {evaluated.round}")
        return Group(head, *map(Text, lines))

    def _remaining(self, now: Snapshot) -> str:
        paces = [r.seconds for r in now.rounds[-RECENT_ROUNDS:] if r.seconds is not None]
        left = self.total_rounds - (now.rounds[-1].round if now.rounds else 0)
        return f"about {seconds_text(left * sum(paces) / len(paces))} left" if paces and left > 0 else ""


def round_line(closed: RoundFigures, total_rounds: int) -> str:
    """A closed round in one line, without colour."""
    width = len(str(total_rounds))
    asked = "" if closed.asked is None else f" of {closed.asked}"
    head = f"round {closed.round:>{width}}/{total_rounds}  {closed.participants}{asked} devices"
    return "  ".join([head, *_figures(closed)])


def closing_table(result: Result, *, report: str | None = None, result_file: str | None = None) -> str:
    """A run's scores and costs as plain text: devices before and after, bytes, joules, and the paths of the files."""
    warnings = () if result.verdict is None else result.verdict.warnings
    blocks = [_devices_block(result), "\n".join(f"warning: {text}" for text in warnings), _cost_block(result)]
    if codec_tables.is_auto(result.rounds):
        lines = codec_tables.counts(result.rounds)
        blocks.append("\n".join(f"{'' if k else 'codecs':<9}{line}" for k, line in enumerate(lines)))
    if array_tables.is_partial(result.rounds):
        blocks.append(f"{'arrays':<9}{array_tables.counts(result.rounds)}")
    files = [(name, path) for name, path in (("report", report), ("result", result_file)) if path]
    blocks.append("\n".join(f"{name:<9}{path}" for name, path in files))
    return "\n\n".join(filter(None, blocks)) + "\n"


def _figures(closed: RoundFigures) -> list[str]:
    refused, skipped = (f"{n} {what}" if n else "" for n, what in ((closed.refused, "refused"),
                                                                   (closed.skipped, "skipped")))
    loss = f"loss {closed.loss:.3f}" if closed.loss is not None else ""
    moved = traffic_text(closed.payload_bytes) if closed.payload_bytes else "bytes not counted"
    seconds = seconds_text(closed.seconds) if closed.seconds is not None else ""
    energy = f"energy {joules_text(closed.energy_j)}" + _spread(closed.energy_j)
    return list(filter(None, [refused, skipped, loss, _accuracy(closed), moved, energy, seconds]))


def _accuracy(closed: RoundFigures) -> str:
    if closed.task is not None:
        return closed.task.text
    if closed.accuracy is None:
        return ""
    of = closed.accuracy
    return f"accuracy {share_text(of.mean)} (worst {share_text(of.worst)}, best {share_text(of.best)})"


def phase_of(device: tables.Device) -> str:
    """What an enrolled device does now, for people."""
    if device.new and device.state == "on":
        return "serves"
    if device.cannot:
        return f"cannot: {device.cannot}"
    return (device.phase or "on") if device.state == "on" else "off"


def _device_cells(device: DeviceLine) -> tuple[str, ...]:
    moved = device.payload
    return (
        plain_text(device.name) + (" (new)" if device.new else ""), plain_text(device.phase)[:60],
        share_text(device.accuracy) if device.task is None else device.task.short_text,
        bytes_text(moved.up) if moved else ABSENT,
        bytes_text(moved.down) if moved else ABSENT, joules_text(device.energy),
    )  # fmt: skip


def _devices_block(result: Result) -> str:
    if result.task is not None:
        return _task_block(result)
    stages = result.stages()
    if not stages:
        return "no device was evaluated in this run"
    rows = [(p.device + " (new)" * p.new, [p.at(s) for s in stages]) for p in result.personalization]
    pooled = (("all, pooled", result.evaluated), ("new, pooled", result.new_devices))
    sums = [(name, [evaluated.at(s) for s in stages]) for name, evaluated in pooled if evaluated]
    titles = [stage_text(stage, method) for stage, method in stages.items()]
    known = [any(s.calibration_error is not None for p in result.personalization if (s := p.at(stage)))
             for stage in stages]
    measures = ["accuracy  macro-F1" + "    ECE" * one for one in known]
    first = max(len(name) for name, _ in [*rows, *sums])
    widths = [max(len(title), len(measure)) for title, measure in zip(titles, measures, strict=True)]
    head = [_cells("", titles, first, widths), _cells("device", measures, first, widths)]
    rule = "-" * len(head[0])
    table = [_cells(plain_text(name), map(_score_text, scores, known), first, widths) for name, scores in rows]
    foot = [_cells(name, map(_score_text, scores, known), first, widths) for name, scores in sums]
    return "\n".join([*head, rule, *table, *([rule, *foot] if foot else [])])


def _task_block(result: Result) -> str:
    """The measures of each device and stage, a line each."""
    rows = [(p.device + " (new)" * p.new, p.task) for p in result.personalization]
    rows += [("all, pooled", result.task), ("new, pooled", result.task_new_devices)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        f"{plain_text(name):<{width}}  {stage_text(stage, score.method):<14}  {score.whole_text}"
        for name, scores in rows for stage, score in (scores or {}).items()
    )


def _cells(name: str, cells: Iterable[str], first: int, widths: Sequence[int]) -> str:
    return name.ljust(first) + "".join("   " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _score_text(score: Score | None, calibrated: bool) -> str:
    """calibrated: whether the calibration error has a column."""
    text = f"{share_text(score.accuracy if score else None):>8}  {share_text(score.macro_f1 if score else None):>8}"
    return text + f"  {share_text(score.calibration_error if score else None):>5}" * calibrated


def _cost_block(result: Result) -> str:
    sums = result.totals
    lines = [
        f"{'bytes' if name == 'payload' else '':<9}{name:<10}{traffic_text(getattr(sums, key) if sums else None)}"
        for name, key in TOTAL_ROWS
    ]
    devices = result.devices + sum(p.new for p in result.personalization)
    skipped = cost_tables.skipped_text(result)
    lines += [f"{'':<9}{skipped}"] if skipped else []
    return "\n".join([*lines, *energy_lines(sums, devices)])


def energy_lines(sums: Sums | None, devices: int) -> Iterator[str]:
    """The joules, by phase with source and spread, and what they do not include. devices: of the fleet."""
    energy = sums.energy_j if sums else None
    head = "energy"
    if energy is None:
        yield f"{head:<9}{joules_text(None)}"
    else:
        phases = ", ".join(
            f"{phase} {phase_text(j)}" for phase in WORKING if (j := energy.phases.get(phase)) is not None
        )
        figure = f"{joules_text(energy)}{_spread(energy)} ({phases})"
        yield f"{head:<9}{figure}  {energy.source}{missing_text(energy.missing)}"
    for reason in absent_text(sums.absent_energy if sums else None, devices):
        yield f"{'':<9}not in it: {plain_text(reason)}"


def _spread(energy: Joules | None) -> str:
    spread = spread_text(energy) if energy else ""
    return f" [{spread}]" if spread else ""
