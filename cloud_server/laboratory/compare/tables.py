"""A comparison as tables: on the terminal, in tables.csv, and the cell texts that the page uses too."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence

from cloud_server.figures.formatting import ABSENT, bytes_text, phase_text, plain_text
from cloud_server.figures.scores import ACCURACY
from cloud_server.laboratory.compare.comparison import (
    MEASURES,
    MODELS,
    Bound,
    Comparison,
    Entry,
    Measure,
    Reached,
    Stat,
    number_text,
)
from cloud_server.laboratory.compare.finished_runs import BY, DEVICES, NOVEL
from fleet_core.tasks.task import KINDS, NAMES

MOST_OUTPUTS = 4
"""Measures of single numbers in a line of the terminal."""
LOWER = ("variance", "calibration_error", "nvar")
"""Figures of which less is better, whatever the runs measure."""
TIMES = "\u00d7"
SIGNS = {"=": "", ">": ">", "<": "<"}
CSV_HEADS = ("label", "method", "setting", "seeds", "table", "figure", "mean", "std", "min", "max", "sign", "reached")


def share(value: float) -> str:
    return f"{value:.3f}"


def amount(value: float) -> str:
    """In the unit of a number that a model predicts, or of a score: 1,230, 12.3 or 0.00123."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def text_of(key: str) -> Callable[[float], str]:
    """How a figure of ``Entry.final`` is written."""
    return amount if key.startswith(("mae ", "score ")) else share


def small(value: float) -> str:
    """A variance, plain or normalized, with two significant digits."""
    return f"{value:.2g}"


def stat_text(stat: Stat | None, text: Callable[[float], str] = share) -> str:
    """For example 0.912 ± 0.004 or 1.49 ± 0.19 TFLOP; a dash for a missing figure."""
    return ABSENT if stat is None else _spread(stat.mean, stat.std, text)


def bound_text(bound: Bound | None, text: Callable[[float], str]) -> str:
    """For example 163, 163 ± 4 or >1,000; a dash for a missing figure."""
    return ABSENT if bound is None else SIGNS[bound.sign] + _spread(bound.value, bound.std, text)


def _spread(mean: float, std: float | None, text: Callable[[float], str]) -> str:
    """Mean and spread in the unit and with the digits of the mean; only the mean if there is no spread."""
    number, _, unit = text(mean).partition(" ")
    shown = float(number.replace(",", ""))
    if not std or not shown:
        return text(mean)
    around = std / (mean / shown if unit else 1)
    return f"{number} ± {around:,.{len(number.partition('.')[2])}f} {unit}".rstrip()


def gain_text(gain: Bound | None) -> str:
    """For example 4.7× or >4.7×; empty without a gain."""
    return "" if gain is None else f"{SIGNS[gain.sign]}{gain.value:.{1 if gain.value >= 0.095 else 2}f}{TIMES}"


def kinds(comparison: Comparison) -> list[str]:
    """The kinds of evaluation other than that of the devices that train, under the served model: new devices by support
    share, then novel classes."""
    found = {kind: None for entry in comparison.entries for kind in entry.final if kind != DEVICES and BY not in kind}
    return sorted(found, key=lambda kind: (kind == NOVEL, kind))


def under_models(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    """(kind of devices, its columns) where devices were evaluated under several kinds of models: (key in
    ``Entry.final``, title of the kind of model) for the served one and the others."""
    there = {kind for entry in comparison.entries for kind in entry.final}
    found = []
    for kind in (DEVICES, *kinds(comparison)):
        others = [(f"{kind}{BY}{model}", title) for model, title in MODELS.items() if f"{kind}{BY}{model}" in there]
        found += [(kind, [(kind, "served"), *others])] if others else []
    return found


def kind_text(kind: str) -> str:
    """``new 0.2`` → new devices, 20 % support."""
    name, _, support = kind.partition(" ")
    if name == DEVICES:
        return "devices that train"
    if name == NOVEL:
        return "novel classes"
    return f"new devices, {100 * float(support):g} % support" if support else "new devices"


def kind_head(kind: str) -> str:
    """``new 0.2`` → new 20 %."""
    name, _, support = kind.partition(" ")
    return f"{name} {100 * float(support):g} %" if support else name


def columns(comparison: Comparison) -> list[tuple[str, str]]:
    """(key in ``Entry.final``, title) of a kind's figures on the terminal."""
    own = [("mean", comparison.figure.name), ("worst", "worst device")]
    if comparison.figure != ACCURACY:
        return [*own, *of_outputs(comparison)[:MOST_OUTPUTS]]
    known = any("calibration_error" in entry.final[DEVICES] for entry in comparison.entries)
    return [*own, ("macro_f1", "macro-F1"), *([("calibration_error", "ECE")] if known else [])]


def of_outputs(comparison: Comparison) -> list[tuple[str, str]]:
    """(key, title) of a task's measures over all samples, in the order of ``NAMES``: ``mae speed``, MAE speed;
    ``macro_f1 all``, macro-F1. That by which runs are compared is left out: its mean over the devices is shown."""
    found = {key: None for entry in comparison.entries for key in entry.final[DEVICES] if key.partition(" ")[2]}
    named = [(key, name, key.removeprefix(f"{name} ")) for name in NAMES if name != comparison.measured
             for key in found if key.startswith(f"{name} ")]
    return [(key, NAMES[name] if output == "all" else f"{NAMES[name]} {output}") for key, name, output in named]


def less_is_better(comparison: Comparison, key: str) -> bool | None:
    """Of a figure of ``Entry.final``; None if neither less nor more is."""
    name, _, output = key.partition(" ")
    if output:
        return next((kind.lower(name, output) for kind in KINDS.values() if name in kind.NAMES), None)
    return comparison.figure.lower if name in ("mean", "worst", "best") else name in LOWER


# On a terminal --------------------------------------------------------------------------------------------------------


def closing(comparison: Comparison) -> str:
    """One line per label: mean ± spread over seeds of its figures and costs."""
    shown = columns(comparison)
    heads = ("", "seeds", *(title for _, title in shown), *map(kind_head, kinds(comparison)), "rounds", "models",
             "payload", "energy")
    head, *lines = aligned([heads, *(_line(entry, shown, kinds(comparison)) for entry in comparison.entries)])
    return "\n".join([head, "-" * len(head), *lines, *_notes(comparison), *_models(comparison)]) + "\n"


def _models(comparison: Comparison) -> Iterator[str]:
    """What the devices reach under the same kind of model, a column for each."""
    for kind, shown in under_models(comparison):
        rows = [(plain_text(entry.label), *(stat_text(entry.final.get(key, {}).get("mean")) for key, _ in shown))
                for entry in comparison.entries]
        yield f"\n{comparison.figure.name} of {kind_text(kind)}, by the model that they get"
        yield from aligned([("", *(title for _, title in shown)), *rows])


def targets_text(comparison: Comparison) -> str:
    """The cost of every target, one line per label, with the gain over the baseline."""
    measured = [m for m in MEASURES if any(m.key in one.at for entry in comparison.entries for one in entry.reached)]
    blocks = []
    for place, target in enumerate(comparison.targets):
        heads = (target_head(comparison, target), *(measure.head for measure in measured))
        rows = [(plain_text(entry.label), *_costs(entry.reached[place], measured)) for entry in comparison.entries]
        blocks.append("\n".join(aligned([heads, *rows])))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def target_head(comparison: Comparison, target: float) -> str:
    """``to 0.9``, or ``to macro-f1 0.9``."""
    return f"to {target:g}" if comparison.target_of == ACCURACY.key else f"to {comparison.target_of} {target:g}"


def _line(entry: Entry, shown: Sequence[tuple[str, str]], others: Sequence[str]) -> tuple[str, ...]:
    own = entry.final[DEVICES]
    return (
        plain_text(entry.label), str(len(entry.seeds)), *(stat_text(own.get(key), text_of(key)) for key, _ in shown),
        *(stat_text(entry.final.get(kind, {}).get("mean")) for kind in others),
        stat_text(entry.spent.get("rounds"), number_text), stat_text(entry.spent.get("models"), number_text),
        stat_text(entry.spent.get("payload_bytes"), bytes_text), stat_text(entry.spent.get("joules"), phase_text),
    )


def _costs(reached: Reached, measured: Sequence[Measure]) -> Iterator[str]:
    for measure in measured:
        bound, gain = reached.at.get(measure.key), gain_text(reached.gain.get(measure.key))
        yield (SIGNS[bound.sign] + measure.text(bound.value) if bound else ABSENT) + (f" ({gain})" if gain else "")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines; the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]


def _notes(comparison: Comparison) -> list[str]:
    one = all(len(entry.seeds) == 1 for entry in comparison.entries)
    notes = ["one seed each: no spread is known" if one else "±: sample standard deviation over seeds"]
    if comparison.mixed:
        notes.append(f"different {', '.join(comparison.mixed)}: this does not compare methods")
    if not any("joules" in entry.spent for entry in comparison.entries):
        notes.append("energy needs a board whose profile cites what a FLOP and a byte take")
    return notes


# tables.csv -----------------------------------------------------------------------------------------------------------


def csv_text(comparison: Comparison) -> str:
    """One line for each figure, in base units: shares of 1, bytes, FLOPs, joules."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_HEADS)
    for entry in comparison.entries:
        for table, figure, cells in _figures(entry):
            seeds = " ".join(map(str, entry.seeds))
            writer.writerow([entry.label, entry.method, entry.setting, seeds, table, figure, *cells])
    return buffer.getvalue()


def _figures(entry: Entry) -> Iterator[tuple[str, str, list[str]]]:
    for kind, scores in entry.final.items():
        for name, stat in scores.items():
            yield kind, name, _cells(stat)
    for key, stat in entry.spent.items():
        yield "whole run", key, _cells(stat)
    for reached in entry.reached:
        at = f"{reached.target:g}"
        for table, bounds in ((f"cost of {at}", reached.at), (f"gain at {at}", reached.gain)):
            for key, bound in bounds.items():
                std = "" if bound.std is None else repr(bound.std)
                yield table, key, [repr(bound.value), std, "", "", bound.sign, str(reached.seeds)]


def _cells(stat: Stat) -> list[str]:
    return [repr(stat.mean), "" if stat.std is None else repr(stat.std), repr(stat.min), repr(stat.max), "=", ""]
