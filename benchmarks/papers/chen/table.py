"""Chen's Table 2, Figure 3 and the last row of Figure 2 beside ours: accuracy on new devices, its cost, its spread.

Accuracy is that over all samples of the new devices together, as in the paper's appendix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import markdown
from benchmarks.papers import page
from cloud_server.figures.formatting import ABSENT, bytes_text, flops_text
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema

Result = Mapping[str, Any]
Row = Mapping[str, Any]

SUPPORTS = ("0.2", "0.5", "0.9")
TARGETS = (0.8, 0.9, 0.95, 0.97)
SPEECH = (0.2, 0.3, 0.38)
FEDAVG, AS_IT_IS, OWN = "FedAvg", "before.accuracy.pooled", "accuracy.pooled"
LABELS = {
    FEDAVG: "fedavg-meta", "FedAvg(Meta)": "fedavg-meta", "FedMeta(MAML)": "fedmeta-maml",
    "FedMeta(FOMAML)": "fedmeta-fomaml", "FedMeta(Meta-SGD)": "fedmeta-metasgd",
}
CHOSEN = "mnist-20-chosen"
BESIDES = {
    "FedAvg, chosen rate": f"{CHOSEN}/fedavg-meta", "FedAvg(Meta), chosen rate": f"{CHOSEN}/fedavg-meta",
    "MAML, chosen rates": f"{CHOSEN}/fedmeta-maml", "FOMAML, chosen rates": f"{CHOSEN}/fedmeta-fomaml",
    "Meta-SGD, chosen rates": f"{CHOSEN}/fedmeta-metasgd", "MAML, the appendix's form": "mnist-20/maml-appendix",
}
"""Rows at 20 % support only, which the paper does not have: EXPERIMENT/LABEL."""
BOUNDED = "mnist-20-bounded"
RATES = ("client_lr", "inner_lr", "first_rate", "server_lr")
SPOKEN = {**LABELS, "FOMAML, inner rate 0.01": "fomaml-0.01", "FOMAML, the appendix's form": "fomaml-appendix"}
"""The last two are not in the paper."""
SHAKESPEARE = "shakespeare-20"
FIRST = SUPPORTS[0]
FINETUNE, FINETUNING = "mnist-finetune", ("finetune_lr", "finetune_steps")


def experiment_of(label: str, support: str) -> str:
    """FedAvg's training does not depend on the support: everything that is not evaluated with 20 % is in one
    experiment."""
    together = label == "fedavg-meta" and support != FIRST
    return "mnist-fedavg" if together else f"mnist-{float(support):.0%}".rstrip("%")


def place(label: str, support: str, where: str = "") -> tuple[str, str]:
    """The experiment and the label of a row's runs: ``where``, if it is given."""
    experiment, _, own = label.rpartition("/")
    return where or experiment or experiment_of(own, support), own


def kind_of(row: str) -> str:
    """FedAvg's answers are those of the same run's model before fine-tuning."""
    return AS_IT_IS if _as_it_is(row) else OWN


def _as_it_is(row: str) -> bool:
    return row.split(",")[0] == FEDAVG


def details(experiment: str, label: str, evaluated: Sequence[Row]) -> dict[str, Any]:
    """By support: the curve of both accuracies, the cost of each target, and at 20 % every new device's accuracy at the
    end."""
    if experiment == FINETUNE:
        return {}
    targets = SPEECH if experiment.startswith("shakespeare") else TARGETS
    return {support: _of_support(support, evaluated, targets) for support in evaluated[-1].get("new_devices", {})}


def _of_support(support: str, evaluated: Sequence[Row], targets: Sequence[float]) -> dict[str, Any]:
    each = [(row, row["new_devices"][support]) for row in evaluated]
    values = {OWN: [one["accuracy"]["pooled"] for _, one in each],
              AS_IT_IS: [one["before"]["accuracy"]["pooled"] for _, one in each]}
    reached = {
        kind: {str(target): _cost(evaluated, found, target) for target in targets} for kind, found in values.items()
    }
    curve = [list(point) for point in zip([row["round"] for row in evaluated], *values.values(), strict=True)]
    devices = each[-1][1]["devices"].values() if support == FIRST else ()
    return {"curve": curve, "reached": reached, "devices": sorted(round(v, 4) for v in devices)}


def _cost(evaluated: Sequence[Row], values: Sequence[float], target: float) -> dict[str, Any]:
    first = next((k for k, value in enumerate(values) if value >= target), None)
    row = evaluated[-1 if first is None else first]
    spent = {key: row["spent"][key] for key in ("payload_bytes", "flops") if key in row["spent"]}
    return {"reached": first is not None, "round": row["round"], **spent}


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(result: Result, paper: Mapping[str, Any]) -> dict[str, str]:
    accuracy = ["method", *(text for p in SUPPORTS for text in (f"{float(p):.0%}: paper", "ours")), "seeds"]
    cost = ["accuracy", "method", "rounds", "bytes up and down", "operations", "FedAvg's bytes by its own"]
    spread = ["method", "mean over devices", "worst", "best", "variance", "seeds"]
    speech = ["method", "paper", "ours", "seeds"]
    finetune = ["rate", "steps", *(f"{float(p):.0%}" for p in SUPPORTS)]
    return {
        "accuracy": markdown.table(accuracy, _accuracies(result, paper["femnist"])),
        "besides": markdown.table(["method", "20 %", "seeds"], _besides(result)),
        "grid": markdown.table(["method", "rates: macro-F1 in %"], _grid()),
        "bounded": markdown.table(["method", "updates refused", "accuracy", "without the bound"], _bounded(result)),
        "cost": markdown.table(cost, _costs(result, FIRST, TARGETS, {**LABELS, **BESIDES})),
        "spread": markdown.table(spread, _spreads(result, {**LABELS, **BESIDES})),
        "finetune": markdown.table(finetune, _finetunes(result)),
        "shakespeare": markdown.table(speech, _speech(result, paper["shakespeare"])),
        "shakespeare-cost": markdown.table(cost, _costs(result, FIRST, SPEECH, SPOKEN, SHAKESPEARE)),
        "shakespeare-spread": markdown.table(spread, _spreads(result, SPOKEN, SHAKESPEARE)),
    }


def _percent(figure: Sequence[float] | None) -> str:
    return ABSENT if figure is None else f"{figure[0]:.2f} ± {figure[1]:.2f}"


def _accuracies(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for row, label in LABELS.items():
        cells = []
        for number, support in enumerate(SUPPORTS):
            theirs = paper[row][number] if row in paper else None
            figure = f"new_devices.{support}.{kind_of(row)}"
            cells += [_percent(theirs), page.cell(result, experiment_of(label, support), label, figure)]
        each = [page.seeds(result, experiment_of(label, support), label) for support in SUPPORTS]
        yield [row, *cells, ", ".join(each) if len(set(each)) > 1 else each[0]]


def _besides(result: Result) -> Iterator[list[str]]:
    for row, label in BESIDES.items():
        at = place(label, FIRST)
        yield [row, page.cell(result, *at, f"new_devices.{FIRST}.{kind_of(row)}"), page.seeds(result, *at)]


def _grid() -> Iterator[list[str]]:
    """Every candidate, the chosen one in bold."""
    path = Path(__file__).parent / "chosen.json"
    for name, tried in (json.loads(path.read_text())[CHOSEN]["methods"] if path.exists() else {}).items():
        best = max(one["macro_f1"] for one in tried)
        cells = []
        for one in tried:
            hyper = schema.plain(METHODS[name].hyper()) | one["hyper"]
            rates = ", ".join(f"{hyper[key]:g}" for key in RATES if key in hyper and _moves(name, key))
            text = f"{rates}: {100 * one['macro_f1']:.1f}"
            cells.append(f"**{text}**" if one["macro_f1"] == best else text)
        yield [f"`{name}`", "; ".join(cells)]


def _moves(name: str, rate: str) -> bool:
    """FedMeta's devices take no steps of their own, FedAvg's server none."""
    return (rate == "client_lr") == (name == "fedavg-meta")


def _bounded(result: Result) -> Iterator[list[str]]:
    """The same seeds with the adaptive bound and without."""
    for row, label in LABELS.items():
        for seed, one in (page.method_of(result, BOUNDED, label) or {}).get("seeds", {}).items():
            free = (page.method_of(result, "mnist-20", label) or {}).get("seeds", {}).get(seed, {})
            figures = [f"{100 * of['figures'][f'new_devices.{FIRST}.{OWN}']:.2f}" if of else ABSENT
                       for of in (one, free)]
            yield [row, f"{one['refused']:.1%}", *figures]


def _speech(result: Result, paper: Mapping[str, Any]) -> Iterator[list[str]]:
    for row, label in SPOKEN.items():
        found = page.cell(result, SHAKESPEARE, label, f"new_devices.{FIRST}.{kind_of(row)}")
        yield [row, _percent(paper.get(row)), found, page.seeds(result, SHAKESPEARE, label)]


def _finetunes(result: Result) -> Iterator[list[str]]:
    """The fine-tunings tried for FedAvg(Meta); all are of the same model, so its own answers appear once."""
    methods = result["experiments"].get(FINETUNE, {}).get("methods", {})
    tried = dict(sorted(methods.items(), key=lambda one: [one[1]["hyper"][key] for key in FINETUNING]))
    for label in list(tried)[:1]:
        yield [ABSENT, "0", *_by_support(result, label, AS_IT_IS)]
    for label, method in tried.items():
        yield [*(f"{method['hyper'][key]:g}" for key in FINETUNING), *_by_support(result, label, OWN)]


def _by_support(result: Result, label: str, kind: str) -> list[str]:
    return [page.cell(result, FINETUNE, label, f"new_devices.{support}.{kind}") for support in SUPPORTS]


def _spreads(result: Result, rows: Mapping[str, str], where: str = "") -> Iterator[list[str]]:
    for row, label in rows.items():
        of, at = place(label, FIRST, where), f"new_devices.{FIRST}.accuracy"
        mean = page.cell(result, *of, f"{at}.mean")
        if _as_it_is(row) or mean == ABSENT:  # only the mean is known for the model as it is
            continue
        ends = [page.number(result, *of, f"{at}.{figure}") for figure in ("worst", "best")]
        variance = page.number(result, *of, f"{at}.variance", percent=False)
        yield [row, mean, *ends, variance, page.seeds(result, *of)]


def _costs(
    result: Result, support: str, targets: Sequence[float], rows: Mapping[str, str], where: str = ""
) -> Iterator[list[str]]:
    for target in targets:
        base = _spent(result, *place("fedavg-meta", support, where), support, AS_IT_IS, target)
        every = {row: _spent(result, *place(label, support, where), support, kind_of(row), target)
                 for row, label in rows.items()}
        begun = {row: found for row, found in every.items() if found is not None}
        if any(found["reached"] for found in begun.values()):
            for row, found in begun.items():
                yield [f"{target:.0%}", row, *_cells(found), _fewer(base, found)]


def _cells(found: Mapping[str, Any]) -> list[str]:
    sign = "" if found["reached"] else ">"
    flops = sign + flops_text(found["flops"]) if "flops" in found else ABSENT
    return [f"{sign}{found['round']:,.0f}", sign + bytes_text(found["payload_bytes"]), flops]


def _spent(
    result: Result, where: str, label: str, support: str, kind: str, target: float
) -> dict[str, Any] | None:
    """The mean over seeds; if one has not reached the target, the least that all had spent by then."""
    method = page.method_of(result, where, label)
    each = [one["details"][support]["reached"][kind][str(target)] for one in (method or {}).get("seeds", {}).values()
            if support in one.get("details", {})]
    if not each:
        return None
    reached = all(one["reached"] for one in each)
    over = fmean if reached else min
    keys = [key for key in ("round", "payload_bytes", "flops") if all(key in one for one in each)]
    missed = each if reached else [one for one in each if not one["reached"]]
    return {"reached": reached, **{key: over([one[key] for one in missed]) for key in keys}}


def _fewer(base: Mapping[str, Any] | None, found: Mapping[str, Any]) -> str:
    """FedAvg's bytes ÷ this one's."""
    if base is None or base == found or not (base["reached"] or found["reached"]):
        return ABSENT
    sign = ">" if not base["reached"] else "<" if not found["reached"] else ""
    return f"{sign}{base['payload_bytes'] / found['payload_bytes']:.2f}"


# Pictures -------------------------------------------------------------------------------------------------------------


def draw(result: Result, folder: Path) -> None:
    panels = {f"MNIST by writer, {float(p):.0%} support": _curves(result, p) for p in SUPPORTS}
    panels |= {"Shakespeare by role, 20% support": _curves(result, FIRST, SHAKESPEARE, SPOKEN)}
    panels = {title: curves for title, curves in panels.items() if any(len(curve) > 1 for curve in curves.values())}
    if panels:
        page.curves(folder / "curves.png", panels, ylabel="accuracy over all samples of the new devices")
    sets = {"MNIST by writer": _devices(result, {**LABELS, **BESIDES}),
            "Shakespeare by role": _devices(result, SPOKEN, SHAKESPEARE)}
    if any(sets.values()):
        _draw_devices({title: devices for title, devices in sets.items() if devices}, folder / "devices.png")


def _curves(
    result: Result, support: str, where: str = "", rows: Mapping[str, str] = LABELS
) -> dict[str, list[list[Any]]]:
    """The mean over the seeds that have begun, where all have evaluated."""
    found = {}
    for row, label in rows.items():
        method = page.method_of(result, *place(label, support, where))
        column = 2 if _as_it_is(row) else 1
        each = [{point[0]: point[column] for point in one["details"][support]["curve"]}
                for one in (method or {}).get("seeds", {}).values() if support in one.get("details", {})]
        if each:
            common = sorted(set.intersection(*(set(one) for one in each)))
            found[row] = [[number, fmean(one[number] for one in each), None] for number in common]
    return found


def _devices(result: Result, rows: Mapping[str, str], where: str = "") -> dict[str, list[float]]:
    """The accuracies of all new devices, of all seeds, by row and round."""
    found = {}
    for row, label in rows.items():
        method = page.method_of(result, *place(label, FIRST, where))
        seeds = list((method or {}).get("seeds", {}).values())
        values = sorted(v for one in seeds for v in one.get("details", {}).get(FIRST, {}).get("devices", []))
        if not _as_it_is(row) and values:
            found[f"{row}, round {min(one['judged'] for one in seeds if 'judged' in one):,}"] = values
    return found


def _draw_devices(sets: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """The share of new devices with at most a given accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    image, row_of_axes = pyplot.subplots(
        1, len(sets), figsize=(5.5 * len(sets), 4.8), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (title, devices) in zip(row_of_axes[0], sets.items(), strict=True):
        for row, values in devices.items():
            share = [(k + 1) / len(values) for k in range(len(values))]
            axes.step(values, share, where="post", label=row, linewidth=1.3)
        axes.set(xlabel="accuracy of a new device, 20% support", title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    row_of_axes[0][0].set_ylabel("share of devices with at most that")
    image.savefig(path, dpi=130)
    pyplot.close(image)
