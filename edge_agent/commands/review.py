"""``edge-agent review``: shows stored samples without a label, least certain first, and takes their labels.

In a fleet that predicts numbers a label is its targets, one number for each output.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.commands.device_commands import numbers
from edge_agent.inference.device_api import Device, UnlabelledSample
from fleet_core.base import terminal
from fleet_core.base.errors import ConfigError

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = 60
CHANNELS = 4
LIKELY = 3


def review(
    home: Path, limit: int, name: str | None, label: str | None, *, target: str | None = None, new_class: bool,
    as_json: bool,
) -> None:
    """Lists at most ``limit`` samples, and on a terminal asks for the label of each. name, and label or target: labels
    this sample and asks for nothing. Raises ConfigError, DataError, StateError."""
    device = Device(home)
    given = label if target is None else target
    if (name is None) != (given is None) or (label is not None and target is not None):
        raise ConfigError("--id and --label belong together", expected="--id with --label CLASS or --target NUMBER,…")
    if name is not None and given is not None:
        device.label(name, given if target is None else numbers(target), new_class=new_class)
        print(f"{name} is {given}; the next personalization learns it: edge-agent personalize")
        return
    found = device.unlabelled(limit)
    if as_json:
        terminal.show([one.plain for one in found])
    elif not found:
        print("no unlabelled samples; a [[source]] in device.toml stores them, or a program with edge_agent.Device.add")
    elif (device.classes or device.outputs) and sys.stdin.isatty() and sys.stdout.isatty():
        _ask(device, found, new_class)
    else:
        terminal.table([(one.id, terminal.date(one.time), likely(one)) for one in found], ("id", "time", "answer"))


def _ask(device: Device, found: list[UnlabelledSample], new_class: bool) -> None:
    outputs = device.outputs
    what = f"targets: {', '.join(outputs)}, as 1.5,20" if outputs else f"classes: {', '.join(device.classes)}"
    print(f"{what}; Enter leaves a sample as it is, Ctrl-D ends")
    labelled = 0
    with contextlib.suppress(EOFError):
        for number, one in enumerate(found, 1):
            print(f"\n{number} of {len(found)}  {terminal.date(one.time)}  {likely(one)}")
            print("\n".join(drawn(one.x)))
            while label := input("targets: " if outputs else "class: ").strip():
                try:
                    device.label(one.id, numbers(label) if outputs else label, new_class=new_class)
                except ConfigError as error:
                    print(error)
                else:
                    labelled += 1
                    break
    print(f"\n{labelled} labelled" + ("; the next personalization learns them: edge-agent "
                                      "personalize" if labelled else ""))


def likely(one: UnlabelledSample) -> str:
    """The most probable classes, or the numbers; empty without an answer."""
    if one.answer is None:
        return ""
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
