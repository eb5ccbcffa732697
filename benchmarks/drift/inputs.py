"""How soon a device of a task without classes notices drift in its inputs, and how often it raises a false alarm.

Numbers: UCI HAR's gyroscope windows, 21 people, as ``benchmarks/tasks/run.py`` divides them. Anomalies: MIT-BIH's heart
beats of 22 patients, the normal ones alone, as ``benchmarks/tasks/anomalies.py`` divides them. A device makes its
reference of its own samples, and its later ones are its stream of answers. Shifts and delays are those of ``run.py``,
and so are the two constants, which were not chosen here. No model is trained: only inputs are compared.

    METAFLEET_SHARED=FOLDER nice python -m benchmarks.drift.inputs

Writes inputs.json and the tables in INPUTS.md, beside this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import markdown
from benchmarks.drift.run import (
    MOST_STREAM,
    NONE,
    OTHER,
    SHIFTS,
    WITHIN,
    Array,
    Device,
    false_alarms,
    judged,
    noticed_text,
)
from benchmarks.heartbeat.build import read_source
from benchmarks.tasks import anomalies
from benchmarks.tasks.run import people
from fleet_core.base import storage
from fleet_core.data.heartbeat import expand
from fleet_core.personalization.drift import LIMIT, SLACK
from fleet_core.personalization.input_drift import InputReference

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "inputs.json", HERE / "INPUTS.md"
Part = tuple[Array, Array]
"""(own, later) samples of a device."""


def numbers() -> list[Part]:
    shared = Path(os.environ["METAFLEET_SHARED"])
    return [(own[0], later[0]) for own, later in people(shared / "data" / "har-train21.npz")]


def quiet_beats() -> list[Part]:
    source = read_source()
    return [(one.own, one.x[one.y == 0]) for one in anomalies.patients(expand(source.pop("x"), **source))]


SETS = {"numbers from movements": numbers, "quiet heart beats": quiet_beats}


def devices(parts: Sequence[Part]) -> list[Device]:
    """Those with samples enough for a reference; the others are left out."""
    found = []
    for number, (own, later) in enumerate(parts):
        reference = InputReference.of(own)
        if reference is None or not len(later):
            continue
        x, rng = later[:MOST_STREAM], np.random.default_rng(0)
        other = parts[(number + 1) % len(parts)][1][:WITHIN]
        moved = {shift: np.asarray(change(x[:WITHIN], rng), np.float32) for shift, change in SHIFTS.items()}
        found.append(Device(str(number), {name: reference.surprise(one) for name, one in
                                          {NONE: x, **moved, **({OTHER: other} if len(other) else {})}.items()}))
    return found


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    sets = result["sets"]
    false = [(name, str(one["devices"]), str(one["with_false_alarms"]), str(one["answers"]), str(one["false_alarms"]),
              f"{1000 * one['false_alarms'] / one['answers']:.2f}") for name, one in sets.items()]
    shifts = [(shift, *(noticed_text(one["shifts"].get(shift)) for one in sets.values())) for shift in (*SHIFTS, OTHER)]
    head = "set", "devices", "with a false alarm", "answers", "false alarms", "in 1000 answers"
    return {"false": markdown.table(head, false), "shifts": markdown.table(("shift", *sets), shifts)}


def measured(those: list[Device]) -> dict[str, Any]:
    alarmed = sum(false_alarms([one], SLACK, LIMIT)[0] > 0 for one in those)
    return {**judged(those, SLACK, LIMIT), "with_false_alarms": alarmed}


def main() -> None:
    result = {"slack": SLACK, "limit": LIMIT, "sets": {name: measured(devices(of())) for name, of in SETS.items()}}
    storage.write_atomic(RESULT, (json.dumps(result, indent=1) + "\n").encode())
    storage.write_atomic(PAGE, markdown.filled(PAGE.read_text(encoding="utf-8"), tables(result)).encode())


if __name__ == "__main__":
    main()
