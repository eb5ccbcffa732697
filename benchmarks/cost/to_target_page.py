"""to_target.json, to_target.md and their pictures, from the runs that have ended, live.json and result.json."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import markdown
from benchmarks.cost import live, to_target
from benchmarks.cost.to_target import (
    BEST,
    CHOOSING,
    CHOSEN,
    FEDAVG,
    FIGURES,
    HERE,
    PER_FEDAVG,
    PFLDYN,
    ROWS,
    Choosing,
    Curve,
    end,
)
from cloud_server.figures.formatting import bytes_text
from cloud_server.laboratory.compare.comparison_charts import style
from cloud_server.laboratory.run.run_folder import Store
from fleet_core.base.storage import write_atomic, write_json
from fleet_core.power.radio import HUANG

RESULT, PAGE, LIVE = HERE / "to_target.json", HERE / "to_target.md", HERE / "live.json"
FRONT_PICTURE = HERE.parent.parent / "docs" / "costs-front.png"
FP32 = {label: (label, "fp32") for label in (PER_FEDAVG, FEDAVG, PFLDYN)}
TITLES = {"heartbeat-22": "Heart beats, new patients", "har": "Human activity, new people", "omniglot": "Omniglot",
          "mnist": "MNIST, new writers", "cifar-10": "CIFAR-10, ACID-5"}
WORDS = {"macro_f1": "macro-F1", "accuracy": "accuracy"}
MARKERS = {"fp32": "o", "fp16": "h", "int8": "s", "int4": "D", "ternary": "^", "topk-10/int4": "<", "topk-10": "v",
           "topk-1/topk-10": "X", "topk-1": "P", "auto": "*"}
HAR = "har"
GOALS = (50.0, 10.0)
"""Bytes of Per-FedAvg, and of PFLDyn-Proto, in fp32 over those of the chosen codec: at least these."""

Key = tuple[str, str]
Curves = dict[Key, list[Curve]]


def write(runs: Path) -> None:
    """Adds the runs that have ended in ``runs`` to to_target.json, and makes the page and the pictures from that."""
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name in FIGURES:
        for folder in sorted((runs / name / "rows").glob("*")):
            label, _, codec = folder.name.partition(" ")
            ended = [one for one in (folder / f"{label}-s{seed}" for seed in to_target.SEEDS) if Store(one).done]
            if ended:
                rows = kept.setdefault(name, {})
                curves = (*rows.get(f"{label} {codec}", ()), *(asdict(to_target.curve(name, one)) for one in ended))
                by_seed = {one["seed"]: one for one in curves}
                rows[f"{label} {codec}"] = [by_seed[seed] for seed in sorted(by_seed)]
    write_json(RESULT, kept)
    chosen = json.loads(CHOSEN.read_text())
    found = {name: curves_of(kept[name]) for name in FIGURES if name in kept and name in chosen}
    fleets = json.loads(LIVE.read_text())
    tables = {"goals": goals_table(found), "targets": targets_table(found, chosen), "chosen": chosen_table(chosen),
              "live": live_table(fleets, found), "plan": plan_table(fleets)}
    write_atomic(PAGE, markdown.filled(PAGE.read_text(), tables).encode())
    rows = json.loads((HERE / "result.json").read_text())["rows"]
    draw_front(fronts_of(found, chosen, rows), FRONT_PICTURE)
    draw_curves(found, HERE / "to_target.png")


def curves_of(kept: Mapping[str, Sequence[Mapping[str, Any]]]) -> Curves:
    """(label, codec) -> curves by seed."""
    return {
        (name.partition(" ")[0], name.partition(" ")[2]): [
            Curve(one["seed"], *(tuple(one[key]) for key in ("figure", "rounds", "up", "down", "flops")))
            for one in several
        ] for name, several in kept.items()
    }


# Targets --------------------------------------------------------------------------------------------------------------


def target_of(several: Sequence[Curve]) -> float:
    """The highest whole point that every seed reaches."""
    return math.floor(100 * min(max(one.figure) for one in several) + 1e-9) / 100


def spent(several: Sequence[Curve], target: float) -> tuple[float, float, int]:
    """(mean bytes of all devices, mean rounds, seeds) of the seeds that reach the target."""
    at = [(one, k) for one in several if (k := one.first(target)) is not None]
    if not at:
        return math.nan, math.nan, 0
    return mean(one.total(k) for one, k in at), mean(one.rounds[k] for one, k in at), len(at)


def goals_table(found: Mapping[str, Curves]) -> str:
    """What the chosen codec reaches, by task, beside ``GOALS``; a dash without its runs."""
    rows = []
    for name, curves in found.items():
        best, base = curves.get((PFLDYN, BEST)), curves[FP32[PFLDYN]]
        if best is None:
            rows.append([TITLES[name], *["-"] * 4])
            continue
        times = [reached(best, curves[FP32[label]])[-1] for label in (PER_FEDAVG, PFLDYN)]
        change = mean(map(end, best)) - mean(map(end, base))
        cells = [(text, text != "-" and float(text) >= least) for text, least in zip(times, GOALS, strict=True)]
        cells.append((f"{change:+.3f}", change >= -to_target.WITHIN))
        rows.append([TITLES[name], str(len(best)), *(text + ("" if met else ", **missed**") for text, met in cells)])
    return markdown.table(("task", "seeds", "Per-FedAvg's / its, 50", "PFLDyn-Proto's / its, 10", "at the end, -0.005"),
                          rows)


def targets_table(found: Mapping[str, Curves], chosen: Mapping[str, Any]) -> str:
    head = ("task", "method", "codec", "seeds", "at the end", "target", "rounds", "bytes", "Per-FedAvg's / its",
            "target", "rounds", "bytes", "PFLDyn-Proto's / its")
    return markdown.table(head, [line for name, curves in found.items() for line in lines(name, curves, chosen[name])])


def lines(name: str, curves: Curves, chosen: Mapping[str, Any]) -> Iterator[list[str]]:
    best = chosen["methods"][BEST]
    for key in ROWS:
        if key not in curves:
            continue
        ends = [end(one) for one in curves[key]]
        codec = f"`{key[1]}`" if key[1] != BEST else f"best: `{best['codec']}`, penalty {best['hyper']['penalty']:g}"
        cells = [TITLES[name], f"`{key[0]}`", codec, str(len(ends)),
                 f"{mean(ends):.3f}" + (f" ± {stdev(ends):.3f}" if len(ends) > 1 else "")]
        for label in (PER_FEDAVG, PFLDYN):
            base = curves.get(FP32[label])
            cells += reached(curves[key], base) if base else ["-"] * 4
        yield cells


def reached(several: Sequence[Curve], base: Sequence[Curve]) -> list[str]:
    """Cells: target, rounds, bytes, and the base's bytes over these."""
    target = target_of(base)
    moved, rounds, seeds = spent(several, target)
    if not seeds:
        return [f"{target:.2f}", f"> {several[0].rounds[-1]}", "-", "-"]
    if seeds < len(several):
        return [f"{target:.2f}", f"{rounds:.0f} ({seeds} of {len(several)} seeds)", "-", "-"]
    return [f"{target:.2f}", f"{rounds:.0f}", bytes_text(moved), f"{spent(base, target)[0] / moved:.1f}"]


def chosen_table(chosen: Mapping[str, Any]) -> str:
    """A row per task and penalty: by codec, the figure at the end and bytes of the run."""
    codecs = list(dict.fromkeys(one["codec"] for of in chosen.values() for one in of["codecs"]))
    rows = []
    for name in FIGURES:
        found = chosen[name]["codecs"] if name in chosen else []
        for label in dict.fromkeys(one["label"] for one in found):
            by = {one["codec"]: one for one in found if one["label"] == label}
            tried = ("fp32", *CHOOSING.get(name, Choosing()).codecs)
            cells = [f"{by[codec]['end']:.3f}, {bytes_text(by[codec]['bytes'])}" if codec in by
                     else "diverged" if codec in tried else "-" for codec in codecs]
            rows.append([TITLES[name], f"{next(iter(by.values()))['hyper']['penalty']:g}", *cells])
    return markdown.table(("task", "penalty", *(f"`{codec}`" for codec in codecs)), rows)


# Live fleets ----------------------------------------------------------------------------------------------------------


def live_table(fleets: Mapping[str, Any], found: Mapping[str, Curves]) -> str:
    """Bytes of a device and round by counter, and PFLDyn-Proto's in fp32 over these: simulated, and live by payload and
    wire."""
    lines = []
    for name, live_fleets in fleets.items():
        devices, rows = task_devices(name), rows_of(live_fleets)
        simulated = {key: mean(one.total(-1) / one.rounds[-1] for one in several) / devices
                     for key, several in found[name].items()}
        sums = {key: {counter: sum(row[counter].values()) for counter in live.COUNTERS} for key, row in rows.items()}
        base = FP32[PFLDYN]
        for key, row in rows.items():
            times = [simulated[base] / simulated[key],
                     *(sums[base][counter] / sums[key][counter] for counter in ("payload", "wire"))]
            lines.append([TITLES[name], f"`{row['method']}`", f"`{row['codec']}`",
                          *(f"{value:,.0f}" for value in sums[key].values()), *(f"{value:.2f}" for value in times)])
    head = ("task", "method", "codec", "payload", "MQTT", "wire", "simulated payload, times", "live payload, times",
            "wire, times")
    return markdown.table(head, lines)


def rows_of(live_fleets: Mapping[str, Any]) -> dict[Key, Mapping[str, Any]]:
    return dict(zip(live.ROWS, live_fleets["rows"], strict=True))


# Pictures -------------------------------------------------------------------------------------------------------------


def draw_front(fronts: Mapping[str, Points], path: Path) -> None:
    """By task, in each row: the figure against bytes, and against joules of the radio, of a device and round."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(11.0, 4.0 * len(fronts)), dpi=130, layout="constrained")
    panels = figure.subplots(len(fronts), 2, squeeze=False, sharey="row")
    for row, (title, points) in zip(panels, fronts.items(), strict=True):
        for panel, (what, cost) in zip(row, COSTS.items(), strict=True):
            at = {key: (cost(point), point.figure) for key, point in points.items()}
            panel.plot(*zip(*front(at), strict=True), color="0.6", linewidth=1, zorder=0)
            for (label, codec), (x, y) in at.items():
                panel.errorbar(x, y, points[label, codec].spread, fmt=MARKERS[codec], color=COLOURS[label],
                               markersize=7, elinewidth=0.8)
            panel.set(xscale="log", xlabel=what, title=title)
            panel.grid(alpha=0.3)
        row[0].set_ylabel("macro-F1 at the end")
    used = {key for points in fronts.values() for key in points}
    keys = [Line2D([], [], color=colour, linewidth=4, label=label) for label, colour in COLOURS.items()
            if label in {one for one, _ in used}]
    keys += [Line2D([], [], color="0.3", marker=mark, linestyle="", label=codec) for codec, mark in MARKERS.items()
             if codec in {one for _, one in used}]
    figure.legend(handles=keys, loc="outside lower center", ncols=7, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})


@dataclass(frozen=True)
class Point:
    """A method with a codec: figure at the end with its deviation over seeds, bytes of a device and round."""

    figure: float
    spread: float
    up: float
    down: float


Points = dict[Key, Point]


def fronts_of(found: Mapping[str, Curves], chosen: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> (
    dict[str, Points]
):
    """Title -> points: of human activity, and of ``rows`` of result.json, the heartbeats on validation parts."""
    several = {(one["method"], one["codec"]): Point(mean(one["macro_f1"]), _spread(one["macro_f1"]), **one["bytes"])
               for one in rows if one["data"] == "heartbeat" and not one["failed"]}
    best, curves = chosen[HAR]["methods"][BEST]["codec"], found[HAR]
    rounds = curves[FP32[PFLDYN]][0].rounds[-1] * task_devices(HAR)
    activity = {
        (label, best if codec == BEST else codec):
            Point(mean(map(end, runs)), _spread([end(one) for one in runs]), mean(one.up[-1] for one in runs) / rounds,
                  mean(one.down[-1] for one in runs) / rounds)
        for (label, codec), runs in curves.items()
    }
    return {TITLES[HAR]: activity, "Heart beats, ten patients, validation parts": several}


def _spread(figures: Sequence[float]) -> float:
    return stdev(figures) if len(figures) > 1 else 0.0


def front(points: Mapping[Key, tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, the cheapest first."""
    best: list[tuple[float, float]] = []
    for cost, value in sorted(points.values()):
        if not best or value > best[-1][1]:
            best.append((cost, value))
    return best


COSTS: Mapping[str, Callable[[Point], float]] = {
    "payload of a device and round, up and down, bytes": lambda point: point.up + point.down,
    "radio of a device and round, J (LTE, modelled: half to double)":
        lambda point: HUANG["lte"].joules(point.up, point.down) or math.nan,
}
COLOURS = {label: style(k)[0] for k, label in enumerate((*FP32, "pflscaf-proto"))}


def plan_table(fleets: Mapping[str, Any]) -> str:
    """Bytes of the whole run, all devices, by the ledger, and how far plans are off: on generated samples, and on the
    devices' own."""
    lines = []
    for name, live_fleets in fleets.items():
        for row in rows_of(live_fleets).values():
            cells = []
            for counter in ("payload", "wire"):
                plan, own, moved = (sum(row[f"{of}_{counter}"].values()) for of in ("planned", "planned_own", "run"))
                cells += [bytes_text(moved), f"{plan / moved - 1:+.0%}", f"{own / moved - 1:+.0%}"]
            lines.append([TITLES[name], f"`{row['method']}`", f"`{row['codec']}`", *cells])
    head = ("task", "method", "codec", "payload", "plan", "with samples", "wire", "plan", "with samples")
    return markdown.table(head, lines)


def task_devices(name: str) -> int:
    from cloud_server.laboratory.plan import workload

    return len(workload.build(to_target.task(name)).train)


def draw_curves(found: Mapping[str, Curves], path: Path) -> None:
    """The figure against the bytes so far of all devices, of the rows of the table; a dashed line at the target."""
    from matplotlib.figure import Figure

    columns = min(2, len(found))
    figure = Figure(figsize=(5.5 * columns + 2.0, 3.8 * math.ceil(len(found) / columns)), dpi=130, layout="constrained")
    panels = figure.subplots(math.ceil(len(found) / columns), columns, squeeze=False).ravel()
    for panel in panels[len(found):]:
        panel.set_axis_off()
    for panel, (name, curves) in zip(panels[:len(found)], found.items(), strict=True):
        for k, key in enumerate(ROWS):
            for one in curves.get(key, ()):
                at = [one.total(i) for i in range(len(one.rounds))]
                panel.plot(at, one.figure, color=style(k)[0], linewidth=1.2, label=", ".join(key))
        if FP32[PER_FEDAVG] in curves:
            panel.axhline(target_of(curves[FP32[PER_FEDAVG]]), color="0.5", linewidth=1, linestyle="--")
        panel.set(xscale="log", xlabel="payload of all devices, bytes", ylabel=WORDS[FIGURES[name][1]],
                  title=TITLES[name])
        panel.grid(alpha=0.3)
    shown = {line.get_label(): line for panel in panels for line in panel.get_lines()
             if not str(line.get_label()).startswith("_")}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})
