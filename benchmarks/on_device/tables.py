"""The result files of this folder as Markdown, and the accuracy by number of labels as a picture.

    python -m benchmarks.on_device.tables benchmarks/on_device/*.json > tables.md
    python -m benchmarks.on_device.tables benchmarks/on_device/accuracy.json --figure benchmarks/on_device/accuracy.png

The picture needs matplotlib (``pip install "metafleet[lab]"``).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import table as markdown
from benchmarks.on_device.ways import WAYS

HEADLINE = {"omniglot": "accuracy", "har": "accuracy", "heartbeat": "macro_f1"}
"""The first figure of a set: macro-F1 if nearly all samples are of one class."""
NAMES = {"accuracy": "accuracy", "macro_f1": "macro-F1"}
TITLES = {"omniglot": "Omniglot (Conv-4, 16 channels)", "har": "HAR (1-D CNN)", "heartbeat": "heartbeat-22 (1-D CNN)"}


def _models(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The models in the page's order; files have their keys in alphabetical order."""
    return [(name, found["models"][name]) for name in ("MLP", "1-D CNN", "LeNet", "Conv-4") if name in found["models"]]


def _ways(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(way.name, found[way.name]) for way in WAYS]


def _by_number(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(found.items(), key=lambda pair: int(pair[0]))


def accuracy(found: Mapping[str, Any]) -> str:
    """By set: the figures of each personalizer with each number of labels, then its cost."""
    parts = []
    for name, one in found["sets"].items():
        labels = [str(n) for n in one["labels"]]
        for figure in dict.fromkeys((HEADLINE[name], "accuracy")):
            rows = [[way, *(_spread(cells[n][figure]) for n in labels)] for way, cells in _ways(one["table"])]
            head = [f"{TITLES[name]}, {NAMES[figure]}", *(_labels(n) for n in labels)]
            parts.append(markdown(head, rows))
        if one.get("costs"):
            rows = [[way, *map(_cost, cells.values())] for way, cells in _ways(one["costs"])]
            measured = [_labels(n) for n in next(iter(one["costs"].values()))]
            parts.append(markdown([f"{TITLES[name]}, what it costs", *measured], rows))
    return "\n".join(parts)


def _labels(number: str) -> str:
    return f"{number} label{'' if number == '1' else 's'} a class"


def _spread(one: Mapping[str, Any]) -> str:
    return f"{one['mean']:.3f}" + ("" if one["std"] is None else f" ± {one['std']:.3f}")


def _cost(one: Mapping[str, float]) -> str:
    return f"{1e3 * one['seconds']:.0f} ms, {one['peak_bytes'] / 1e6:.0f} MB"


def unknown(found: Mapping[str, Any]) -> str:
    """For each quantile: the share of known samples that stay known, and of withheld ones that are called unknown."""
    quantiles = found["quantiles"]
    head = ["case", "labels a class", "AUROC", *(f"known / unseen at {q}" for q in quantiles)]
    rows = [
        [name, labels, _spread(one["auroc"]),
         *(f"{1 - one[f'known_{q}']['mean']:.2f} / {one[f'unseen_{q}']['mean']:.2f}" for q in quantiles)]
        for name, by_labels in found["cases"].items() for labels, one in _by_number(by_labels)
    ]  # fmt: skip
    return markdown(head, rows)


def parity(found: Mapping[str, Any]) -> str:
    """The largest difference over seeds, and on how many seeds it is within its limit."""
    figures = ["proto_probabilities", "weights_after_1", "logits_after_10"]
    n = len(found["seeds"])
    head = ["model", "samples", *(f"{figure.replace('_', ' ')} ≤ {found['bars'][figure]:.0e}" for figure in figures)]
    head += [f"{side} and double precision, logits" for side in ("device", "torch")]
    head += ["device no farther from double than torch", "torch no farther than the device"]
    rows = []
    for name, supports in _models(found):
        for support, one in _by_number(supports):
            cells = [_within(one[figure]["device-torch"], n) for figure in figures]
            exact = [one["logits_after_10"][f"{side}-exact"] for side in ("device", "torch")]
            cells += [*(_within(side, n) for side in exact), *(f"{side['no_farther']} of {n}" for side in exact)]
            rows.append([name, support, *cells])
    return markdown(head, rows)


def _within(one: Mapping[str, Any], n: int) -> str:
    return f"{one['median']:.0e}, at most {one['max']:.0e} ({one['within']} of {n})"


def memory(found: Mapping[str, Any]) -> str:
    """Medians in MB and seconds."""
    head = ["model", "predict, MB", "bare", "first answer, s", "bare", "adapt, MB", "bare", "ratio", "after, MB"]
    rows = []
    for name, one in _models(found):
        limits = one["judged"]
        peak = [max(one[f"{who}predict {way}"]["peak"]["median"] for way in ("proto", "maml")) for who in ("", "bare ")]
        start = [max(one[f"{who}predict {way}"]["seconds"]["median"] for way in ("proto", "maml"))
                 for who in ("", "bare ")]
        adapt = [one[who]["peak"]["median"] for who in ("adapt maml", "bare adapt")]
        rows.append([name, *(f"{b / 1e6:.1f}" for b in peak), *(f"{s:.2f}" for s in start),
                     *(f"{b / 1e6:.1f}" for b in adapt), f"{limits['adapt_ratio']:.2f}", f"{limits['after_mb']:.1f}"])
    return markdown(head, rows)


def in_python(found: Mapping[str, Any]) -> str:
    """Medians in MB; the larger figure of the two homes."""
    moments = {"answered": "after an answer", "personalized": "after personalize()"}
    figures = {(moment, kind): f"{kind.upper()} {said}" for moment, said in moments.items()
               for kind in ("uss", "pss", "rss")}
    figures["peak", "rss"] = "highest RSS"
    rows = []
    for name, one in _models(found):
        largest = [max(home[moment][kind]["median"] for home in one.values()) for moment, kind in figures]
        rows.append([name, *(f"{size / 1e6:.1f}" for size in largest)])
    return markdown(["model", *figures.values()], rows)


def starting(found: Mapping[str, Any]) -> str:
    """Medians by version."""
    figures = {"help_cpu_s": "--help, CPU s", "help_mb": "--help, MB", "predict_cpu_s": "predict, CPU s",
               "predict_mb": "predict, MB", "serve_cpu_s": "serve, CPU s", "serve_mb": "serve, MB",
               "run_cpu_s": "run until connected, CPU s", "run_mb": "run, connected, MB"}
    rows = [[name, *(f"{one[key]['median']:.{1 if key.endswith('mb') else 2}f}" for one in found["trees"].values())]
            for key, name in figures.items()]
    return markdown(["edge-agent", *found["trees"]], rows)


def latency(found: Mapping[str, Any]) -> str:
    """Medians."""
    head = ["model", "class means: session, agent, µs", "own weights: session, agent, µs", "ten steps, ms",
            "torch eager, ms", "times as fast", "by processor time"]
    rows = []
    for name, one in _models(found):
        answers = [f"{a['bare_us']:.0f}, {a['added_us']:+.0f}" for a in map(one["answers"].get, ("proto", "maml"))]
        steps = one["steps"]
        rows.append([name, *answers, f"{1e3 * steps['graph_s']:.1f}", f"{1e3 * steps['torch_s']:.1f}",
                     f"{steps['times_as_fast']:.2f}", f"{steps['times_as_fast_processor']:.2f}"])
    return markdown(head, rows)


def int8(found: Mapping[str, Any]) -> str:
    """Size and speed by model, then by set what answers from few labels lose."""
    rows = [[name, f"{one['fp32_bytes'] / 1e3:.0f} → {one['int8_bytes'] / 1e3:.0f}",
             f"{one['fp32_us']:.0f} → {one['int8_us']:.0f}", f"{one['times_as_fast']:.2f}"]
            for name, one in _models(found)]
    parts = [markdown(["encoder", "kB, fp32 → int8", "µs a sample", "times as fast"], rows)]
    for name, one in found["sets"].items():
        labels, figure = [str(n) for n in one["labels"]], HEADLINE[name]
        rows = [[way, *(_both(cells[n][figure]) for n in labels)] for way, cells in one["table"].items()]
        parts.append(markdown([f"{TITLES[name]}, {NAMES[figure]}, fp32 → int8", *map(_labels, labels)], rows))
    return "\n".join(parts)


def batches(found: Mapping[str, Any]) -> str:
    """Processor time and memory by the number of samples at a time."""
    sizes = [size for size, _ in _by_number(found["models"]["MLP"])]
    rows = [[name, *(f"{one[size]['us']:.0f} µs, {one[size]['bytes'] / 1e6:.1f} MB" for size in sizes)]
            for name, one in _models(found)]
    return markdown(["model", *sizes], rows)


def _both(one: Mapping[str, Any]) -> str:
    lost = one["difference"]
    return f"{one['fp32']['mean']:.3f} → {one['int8']['mean']:.3f} ({lost['mean']:+.3f} ± {lost['std'] or 0:.3f})"


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "accuracy": accuracy, "unknown": unknown, "parity": parity, "memory": memory, "latency": latency, "int8": int8,
    "starting": starting, "in_python": in_python, "batches": batches,
}  # fmt: skip
"""The function by the result file's name; other files have other tables."""


def figure(found: Mapping[str, Any], path: Path) -> None:
    """One panel per set: the headline figure by labels per class, with one deviation over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = found["sets"]
    image, panels = pyplot.subplots(1, len(sets), figsize=(4.2 * len(sets), 3.9), layout="constrained", squeeze=False)
    for panel, (name, one) in zip(panels[0], sets.items(), strict=True):
        for number, (way, cells) in enumerate(_ways(one["table"])):
            each = [cells[str(n)][HEADLINE[name]] for n in one["labels"]]
            places = [k + 0.04 * (number - len(one["table"]) / 2) for k in range(len(each))]
            bars = [cell["std"] or 0.0 for cell in each]
            panel.errorbar(places, [cell["mean"] for cell in each], bars, marker="o", markersize=4, capsize=2,
                           linewidth=1.2, label=way, linestyle=":" if way == "not personalized" else "-")
        panel.set_xticks(range(len(one["labels"])), [str(n) for n in one["labels"]])
        panel.set(title=TITLES[name], xlabel="labels of a class", ylabel=NAMES[HEADLINE[name]])
        panel.grid(axis="y", alpha=0.3)
    handles, names = panels[0][0].get_legend_handles_labels()
    image.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    image.savefig(path, dpi=130)
    pyplot.close(image)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--figure", type=Path, help="write a PNG of accuracy.json, which must be among the files")
    options = parser.parse_args()
    for path in options.files:
        found = json.loads(path.read_text())
        if path.stem in TABLES:
            print(f"## {path.name}\n\n{TABLES[path.stem](found)}")
        if path.stem == "accuracy" and options.figure:
            figure(found, options.figure)


if __name__ == "__main__":
    main()
