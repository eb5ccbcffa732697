"""Does a user's own sensor work at the first try: a fleet from each stranger's file, with no setting but the file's
name, compared with plain baselines.

    nice python -m benchmarks.own_data.strangers [--only NAME …] [--out build/strangers] [--quick] [--page]

For each set (``benchmarks.own_data.files``) the commands of docs/first-fleet.md run as processes
(``benchmarks.own_data.walk``): ``metafleet init`` with four devices' first 60 % in a file, the server with its own
broker, four agents until the last round, two devices that join after it with 24 samples each, predict, samples add and
personalize, HTTP, a bundle on another device. A set ends at a command that fails, with its output.

Test samples are the last 40 % of each device's recording, which is in no file that ``init`` sees and from which no
device learns. The fleet's answers are compared with the nearest class mean and logistic regression on spectrum and
statistics (``fleet_core/personalization/plain_baseline.py``), fitted to the training samples of the four devices
together and to those of each device alone, and with each device's most frequent class.

The requirement: a fleet that ends more than 3 points (accuracy or macro-F1) below the best of these baselines comes
with a warning of init, status, log or report that compares it with something; a note that labels are few does not
count. A finished set is not run again: OUT/NAME.json. ``strangers.json`` and the tables of ``strangers.md`` are written
after each set, and ``transcript.json``: the output of the commands that docs/first-fleet.md shows. ``--quick`` takes
few samples and three rounds without a trial: it tests that the commands work, not how good the answers are, and only
writes OUT. ``--page`` only rewrites the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import markdown
from benchmarks.own_data import files
from benchmarks.own_data.commands import Failed
from benchmarks.own_data.walk import LATE, TRAINING, Device, devices_of, walk
from cloud_server.results.result import environment
from cloud_server.results.verdict import score
from fleet_core.base.storage import write_atomic, write_json
from fleet_core.personalization.plain_baseline import LOGISTIC, NEAREST, Baseline, counted

Array = NDArray[Any]

HERE = Path(__file__).parent
RESULT, PAGE, TRANSCRIPT = HERE / "strangers.json", HERE / "strangers.md", HERE / "transcript.json"
SHOWN = ("level-free", files.MIXED)
"""Sets whose commands docs/first-fleet.md shows with their output."""
OUT = Path("build/strangers")
POINTS = 0.03
DIGITS = 4
WHO = {"fleet": "the fleet", "late": "late joiners"}
GROUPS = tuple(WHO)
FLEET, FREQUENT = "the fleet", "most frequent class"
BASELINES = tuple(f"{name}, {how}" for how in ("together", "alone") for name in (NEAREST, LOGISTIC))


@dataclass(frozen=True)
class Scale:
    """per_class: samples of each class on a device. init: further options of ``metafleet init``."""

    per_class: int = 100
    init: tuple[str, ...] = ()


WHOLE, QUICK = Scale(), Scale(20, ("--rounds", "3", "--no-trial"))


def run(name: str, out: Path, scale: Scale) -> dict[str, Any]:
    """A set's part of strangers.json. Raises Failed."""
    every = files.made(name, TRAINING + LATE, scale.per_class)
    devices = devices_of(every)
    form = files.form_of(name)
    walked = walk(out / name, devices, form, scale.init)
    classes = sorted(set(map(str, every.y)))
    groups = dict(zip(GROUPS, (devices[:TRAINING], devices[TRAINING:]), strict=True))
    taught = devices[TRAINING]
    return {
        "form": form, "shape": list(every.x.shape[1:]), "classes": len(classes),
        "labelled": {group: len(of[0].learned.y) for group, of in groups.items()},
        **walked["facts"], "commands": walked["commands"],
        "groups": {group: compared(of, devices[:TRAINING], walked["first"], classes) for group, of in groups.items()},
        "taught": {
            "samples": len(taught.learned.y), "more": 0 if taught.more is None else len(taught.more.y),
            "before": _scored([taught], lambda _: walked["first"][taught.name], classes),
            "after": _scored([taught], lambda _: walked["answers"][taught.name], classes),
        },
    }


def compared(
    devices: Sequence[Device], training: Sequence[Device], answers: Mapping[str, Sequence[str]], classes: Sequence[str]
) -> dict[str, Any]:
    """{samples, scores: {who: [accuracy, macro-F1]}}, pooled over the devices' later samples."""
    known = {name: number for number, name in enumerate(classes)}

    def fitted(own: Sequence[Device], name: str) -> Baseline:
        x = np.concatenate([device.learned.x for device in own])
        y = np.array([known[label] for device in own for label in map(str, device.learned.y)])
        return Baseline.fit(x, y, len(classes), name)

    def frequent(device: Device) -> list[str]:
        labels, counts = np.unique(device.learned.y, return_counts=True)
        return [str(labels[counts.argmax()])] * len(device.later.y)

    scores = {FLEET: _scored(devices, lambda device: answers[device.name], classes),
              FREQUENT: _scored(devices, frequent, classes)}
    for name in (NEAREST, LOGISTIC):
        together = fitted(training, name)
        alone = {device.name: fitted([device], name) for device in devices}
        for how in ("together", "alone"):
            def answered(device: Device, how: str = how, together: Baseline = together,
                         alone: Mapping[str, Baseline] = alone) -> list[str]:
                made = together if how == "together" else alone[device.name]
                return [classes[k] for k in made.labels(device.later.x)]

            scores[f"{name}, {how}"] = _scored(devices, answered, classes)
    return {"samples": sum(len(device.later.y) for device in devices), "scores": scores}


def _scored(devices: Sequence[Device], answered: Any, classes: Sequence[str]) -> list[float]:
    """[accuracy, macro-F1] of ``answered(device)``, labels of its later samples."""
    known = {name: number for number, name in enumerate(classes)}
    counts = np.zeros((len(classes), len(classes)), np.int64)
    for device in devices:
        truth, found = ([known[str(label)] for label in labels] for labels in (device.later.y, answered(device)))
        counts += counted(np.array(truth), np.array(found), len(classes))
    of = score(counts)
    return [round(of.accuracy, DIGITS), round(of.macro_f1, DIGITS)]


# The requirement ------------------------------------------------------------------------------------------------------


def best(group: Mapping[str, Any]) -> tuple[str, list[float]]:
    """(name, [accuracy, macro-F1]) of the best baseline, by accuracy."""
    scores = {name: group["scores"][name] for name in BASELINES}
    name = max(scores, key=lambda each: scores[each])
    return name, scores[name]


def behind(group: Mapping[str, Any]) -> float:
    """How far the fleet is below the best baseline, in accuracy or macro-F1; negative if it is better."""
    return max(max(group["scores"][name][k] for name in BASELINES) - group["scores"][FLEET][k] for k in (0, 1))


def warned(found: Mapping[str, Any]) -> list[str]:
    """Which of init, status, log and report warned."""
    return [who for who, texts in found["warnings"].items() if texts]


def lagging(sets: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(a sentence, which warned) of each group that is more than ``POINTS`` behind."""
    return [
        (f"{name}, {WHO[group]}: {100 * behind(of):.1f} points behind the best baseline ({best(of)[0]})", warned(found))
        for name, found in sets.items() for group, of in found["groups"].items() if behind(of) > POINTS
    ]


def silent(sets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The groups that are behind without a warning; none if the requirement holds."""
    return [sentence for sentence, by in lagging(sets) if not by]


# The page -------------------------------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    sets = result["sets"]
    accuracy = {group: _accuracy(sets, group) for group in GROUPS}
    return {**accuracy, "cost": _cost(sets), "requirement": _requirement(sets)}


def _accuracy(sets: Mapping[str, Any], group: str) -> str:
    head = ("set", FLEET, *BASELINES, FREQUENT, "warning of")
    return markdown.table(head, [
        [name, *(" / ".join(f"{100 * share:.1f}" for share in found["groups"][group]["scores"][who])
                 for who in head[1:-1]), ", ".join(warned(found)) or "none"]
        for name, found in sets.items()
    ])


def _cost(sets: Mapping[str, Any]) -> str:
    head = ("set", "file", "a sample", "model", "init, s", "30 rounds, s", "all, s", "up, kB", "down, kB",
            "a late joiner, before and after more labels")
    return markdown.table(head, [
        [name, found["form"], " by ".join(map(str, found["shape"])), found["model"],
         *(f"{found['seconds'][part]:.0f}" for part in ("init", "rounds", "all")),
         *(f"{found['payload_bytes'][way] / 1000:,.0f}" for way in ("up", "down")),
         f"{100 * found['taught']['before'][0]:.1f} → {100 * found['taught']['after'][0]:.1f}"]
        for name, found in sets.items()
    ])


def _requirement(sets: Mapping[str, Any]) -> str:
    found, quiet = lagging(sets), len(silent(sets))
    lines = [f"Of {len(sets)} sets with two groups each, {len(found)} groups end more than {100 * POINTS:.0f} points "
             f"behind the best baseline, {quiet or 'none'} of them without a warning.", ""]
    lines += [f"* {sentence}; warning of {', '.join(by) or 'nobody'}" for sentence, by in found]
    return "\n".join(lines) + "\n"


def write_page() -> None:
    result = json.loads(RESULT.read_text())
    write_atomic(PAGE, markdown.filled(PAGE.read_text(), tables(result)).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=files.names(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.page:
        return write_page()
    failed = []
    for name in options.only or files.names():
        path, begun = options.out / f"{name}.json", time.monotonic()
        if not path.exists():
            try:
                found = run(name, options.out, QUICK if options.quick else WHOLE)
            except Failed as error:
                failed.append(name)
                print(f"{name}: failed: {error}", file=sys.stderr, flush=True)
                continue
            write_json(path, found)
        found = json.loads(path.read_text())
        print(f"{name}, {time.monotonic() - begun:.0f} s: {_line(found)}", file=sys.stderr, flush=True)
        if not options.quick:
            _keep(name, found)
            if name in SHOWN:
                _keep_transcript(name, options.out)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _keep_transcript(name: str, out: Path) -> None:
    """Keeps the output of a set's commands for people."""
    noted = json.loads((out / name / "commands.json").read_text())
    kept: dict[str, Any] = json.loads(TRANSCRIPT.read_text()) if TRANSCRIPT.exists() else {}
    kept[name] = [{key: note[key] for key in ("command", "stdout", "stderr")} for note in noted
                  if "--json" not in note["command"]]
    write_json(TRANSCRIPT, kept)


def _line(found: Mapping[str, Any]) -> str:
    """The accuracies, as one line of progress."""
    each = (f"{group} {100 * of['scores'][FLEET][0]:.1f} %, best baseline {100 * best(of)[1][0]:.1f} %"
            for group, of in found["groups"].items())
    return f"{found['model']}; {'; '.join(each)}; warnings of {', '.join(warned(found)) or 'none'}"


def _keep(name: str, found: Mapping[str, Any]) -> None:
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    sets = {**result.get("sets", {}), name: found}
    ordered = {each: sets[each] for each in files.names() if each in sets}
    write_json(RESULT, {"environment": environment(), "sets": ordered})
    write_page()
    for text in silent(ordered):
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
