"""``edge-agent review``: shows stored samples without a label, least certain first, and takes their labels.

In a fleet that predicts numbers a label is its targets, one number for each output; in one with several labels it is a
list of names; in one that detects anomalies the samples with the highest scores come first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.inference.device_api import Device, UnlabelledSample
from fleet_core.base import terminal
from fleet_core.base.errors import ConfigError
from fleet_core.tasks.anomaly import SCORE
from fleet_core.tasks.labels import NONE, names_of
from fleet_core.tasks.regression import numbers_of

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 60
CHANNELS = 4
LIKELY = 3
Truth = str | list[str] | list[float]


def review(
    home: Path, limit: int, name: str | None, label: str | None, *, target: str | None = None,
    labels: str | None = None, new_class: bool, as_json: bool,
) -> None:
    """Lists at most ``limit`` samples, and on a terminal asks for the label of each. name, and one of label, labels and
    target: labels this sample and asks for nothing. Raises ConfigError, DataError, StateError."""
    device = Device(home)
    readers: list[tuple[str | None, Callable[[str], Truth]]] = [(label, str), (labels, names_of), (target, numbers_of)]
    given = [(text, read(text)) for text, read in readers if text is not None]
    if len(given) != (name is not None):
        raise ConfigError("--id and --label belong together",
                          expected="--id with --label CLASS, --labels NAME,… or --target NUMBER,…")
    if name is not None:
        (text, truth), = given
        device.label(name, truth, new_class=new_class)
        print(f"{name} is {text or 'none of the labels'}; the next personalization learns it: edge-agent personalize")
        return
    found = device.unlabelled(limit)
    if as_json:
        terminal.show([one.plain for one in found])
    elif not found:
        print("no unlabelled samples; a [[source]] in device.toml stores them, or a program with edge_agent.Device.add")
    elif sys.stdin.isatty() and sys.stdout.isatty():
        _ask(device, found, new_class)
    else:
        terminal.table([(one.id, terminal.date(one.time), likely(one)) for one in found], ("id", "time", "answer"))


def _ask(device: Device, found: list[UnlabelledSample], new_class: bool) -> None:
    what, known, example = (("targets", device.outputs, ", as 1.5,20") if device.outputs else
                            ("labels", device.labels, f", as {','.join(device.labels[:2])}, or {NONE} for none")
                            if device.labels else ("class", device.classes, ""))
    print(f"{what}: {', '.join(known)}{example}; Enter leaves a sample as it is, Ctrl-D ends")
    labelled = 0
    with contextlib.suppress(EOFError):
        for number, one in enumerate(found, 1):
            print(f"\n{number} of {len(found)}  {terminal.date(one.time)}  {likely(one)}")
            print("\n".join(drawn(one.x)))
            while label := input(f"{what}: ").strip():
                try:
                    device.label(one.id, device.typed(label), new_class=new_class)
                except ConfigError as error:
                    print(error)
                else:
                    labelled += 1
                    break
    print(f"\n{labelled} labelled" + ("; the next personalization learns them: edge-agent "
                                      "personalize" if labelled else ""))


def likely(one: UnlabelledSample) -> str:
    """The most probable classes, or the numbers, or the score; empty without an answer."""
    if one.answer is None:
        return ""
    if one.answer.alarm is not None:
        return (f"score {one.answer.values[SCORE]:.6g}, threshold {one.answer.threshold:.6g}"
                + (", ALARM" if one.answer.alarm else ""))
    if one.answer.values:
        return ", ".join(f"{name} {value:.6g}" for name, value in one.answer.values.items())
    if not one.answer.label:
        return ", ".join(f"{name} {share:.0%}" for name, share in one.answer.probabilities.items())
    ordered = sorted(one.answer.probabilities.items(), key=lambda item: -item[1])[:LIKELY]
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered) + (", unknown" if one.answer.unknown else "")


def drawn(x: np.ndarray[Any, Any]) -> list[str]:
    """The first channels of a raw sample [*shape] as lines of bars, each with its least and greatest value."""
    channels = x.reshape(1, -1) if x.ndim < 2 else x.reshape(x.shape[0], -1)
    return [_bars(row.astype(np.float64)) for row in channels[:CHANNELS]]


def _bars(row: np.ndarray[Any, Any]) -> str:
    least, most = float(row.min()), float(row.max())
    means = [part.mean() for part in np.array_split(row, min(COLUMNS, len(row)))]
    step = (most - least) or 1.0
    bars = "".join(BARS[int((mean - least) / step * (len(BARS) - 1))] for mean in means)
    return f"{bars}  {least:.3g} to {most:.3g}"
