"""``edge-agent sources``: opens each source for some seconds, stores nothing, and shows what it gives."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_agent.inference.service import service_of
from edge_agent.sources.interface import Lost
from edge_agent.sources.run_sources import READ_S, Maker, one_line, open_feed, states
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import FleetError
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.board.source_settings import Source, names_of
from fleet_core.data.live import Readings, Taken
from fleet_core.model.layout import InputSpec

NONE = "there are no sources: [[source]] tables in device.toml, docs/sources.md"
SHOWN = 3
"""Number of first readings that are shown, and of numbers in each."""


@dataclass
class Tried:
    """What a source gave.

    readings: rows of numbers. channels: of a reading. rate_hz: readings a second, None below two. whole: samples that
    the source gave as whole samples. samples: those of the fleet's shape, which would be stored. shape: of the last
    sample. fleet_shape, fleet_hz: of the fleet's samples. first: the first readings. label: the last label that came.
    lost, why: what could not be used. error: why the source failed; empty if it did not.
    """

    name: str
    kind: str
    seconds: float = 0.0
    readings: int = 0
    channels: int | None = None
    rate_hz: float | None = None
    whole: int = 0
    samples: int = 0
    shape: tuple[int, ...] | None = None
    fleet_shape: tuple[int, ...] = ()
    fleet_hz: float | None = None
    first: list[list[float]] = field(default_factory=list)
    label: str = ""
    lost: int = 0
    why: str = ""
    error: str = ""

    @property
    def wrong(self) -> str:
        """Why none of it can be used; empty if some can."""
        nothing = "nothing came" if not (self.readings or self.whole or self.lost) else self.why
        return self.error or ("" if self.samples or (self.readings and not self.lost) else nothing)


def command(home: Path, seconds: float | None, as_json: bool) -> None:
    """Lists the device's sources; with ``seconds`` each source is opened for that time. Exit code 1 if a source gives
    nothing that can be used. Raises ConfigError, StateError before a model has arrived."""
    settings = settings_of(home)
    if seconds is None:
        return _list(home, settings, as_json)
    service = service_of(home, settings)
    service.known_classes()
    found = []
    for source, name in zip(settings.source, names_of(settings.source), strict=True):
        processes.say(f"{name}: listening for {seconds:g} s")
        found.append(tried(source, name, home, settings, service.layout.sample, seconds))
    if as_json:
        terminal.show([schema.plain(one) for one in found])
    else:
        _show(found, settings)
    if any(one.wrong for one in found):
        sys.exit(1)


def tried(
    source: Source, name: str, home: Path, settings: Settings, spec: InputSpec, seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Tried:
    """What the source gives in ``seconds``, or less if it ends. Files of a folder are not marked as taken."""
    found, began = Tried(name, source.kind, fleet_shape=tuple(spec.shape), fleet_hz=spec.rate_hz or None), clock()
    try:
        maker = Maker(source, settings, spec)
        feed = open_feed(source, f"{name}.tried", home, settings, spec)
        try:
            ended = False
            while not ended and clock() - began < seconds:
                items = feed.read(min(READ_S, seconds))
                ended = items is None
                for item in items or ():
                    _note(found, item)
                _note_samples(found, maker.made(items), spec)
        finally:
            feed.close()
            (home / f"sources-{name}.tried.taken").unlink(missing_ok=True)
    except (FleetError, OSError) as error:
        found.error = one_line(error)
    found.seconds = round(clock() - began, 3)
    found.rate_hz = round(found.readings / found.seconds, 2) if found.readings > 1 and found.seconds else None
    return found


def _note(found: Tried, item: Readings | Taken | Lost) -> None:
    if isinstance(item, Readings):
        rows = item.values.tolist()
        found.first += [row[:SHOWN] for row in rows[: SHOWN - len(found.first)]]
        found.readings, found.channels = found.readings + len(rows), item.values.shape[1]
        if item.labels is not None and item.labels[-1]:
            found.label = item.labels[-1]
    elif isinstance(item, Taken):
        found.whole += 1
        found.label = item.label or found.label


def _note_samples(found: Tried, made: Iterable[Taken | Lost | Readings], spec: InputSpec) -> None:
    from fleet_core.data.prepare import prepared

    for one in made:
        if isinstance(one, Taken):
            x = one.x if one.x.shape == tuple(spec.shape) else prepared(one.x[None], spec)[0]
            found.shape = x.shape
            if x.shape == tuple(spec.shape):
                found.samples += 1
            else:
                found.lost, found.why = found.lost + 1, f"a sample has shape {list(x.shape)}"
        elif isinstance(one, Lost) and one.why:
            found.lost, found.why = found.lost + 1, one.why


def _show(found: list[Tried], settings: Settings) -> None:
    if not found:
        return print(NONE)
    rows = [(one.name, one.kind, _text(one.rate_hz), _text(one.channels), str(one.samples), _shape(one),
             "; ".join(" ".join(f"{value:.6g}" for value in row) for row in one.first) or "-") for one in found]
    terminal.table(rows, ("source", "kind", "readings/s", "channels", "samples", "shape, the fleet's", "first values"))
    for one in found:
        if one.wrong:
            print(f"wrong: {one.name}: {one.wrong}")
        elif one.lost:
            print(f"note: {one.name}: {one.lost} could not be used: {one.why}")
    for source, one in zip(settings.source, found, strict=True):
        if source.rate_hz and one.rate_hz and not 0.8 < one.rate_hz / source.rate_hz < 1.25:
            print(f"note: {one.name}: {one.rate_hz:g} readings a second came; its rate_hz is {source.rate_hz:g}")
        if one.fleet_hz and one.rate_hz and not source.rate_hz and not 0.8 < one.rate_hz / one.fleet_hz < 1.25:
            print(f"note: {one.name}: {one.rate_hz:g} readings a second came, and the fleet's windows have "
                  f"{one.fleet_hz:g}; with its rate_hz they are resampled")


def _list(home: Path, settings: Settings, as_json: bool) -> None:
    """What the agent wrote about each source."""
    known = states(home)
    names = names_of(settings.source)
    if as_json:
        return terminal.show([{"name": name, "kind": source.kind,
                               **({} if name not in known else schema.plain(known[name]))}
                              for name, source in zip(names, settings.source, strict=True)])
    if not names:
        return print(NONE)
    rows: list[tuple[str, ...]] = []
    for name, source in zip(names, settings.source, strict=True):
        one = known.get(name)
        rows.append((name, source.kind, "-") if one is None else (name, source.kind, one.state))
        rows[-1] += ("-",) * 4 if one is None else (str(one.readings), str(one.kept), str(one.labelled),
                                                   one.last_error or one.last_lost or "-")
    terminal.table(rows, ("source", "kind", "state", "readings", "kept", "labelled", "last error"))
    print("--try SECONDS shows what each gives")


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _shape(one: Tried) -> str:
    return f"{'-' if one.shape is None else list(one.shape)}, {list(one.fleet_shape)}"
