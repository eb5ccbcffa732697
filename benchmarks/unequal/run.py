"""Unequal classes, on heart beats: episodes with as many samples of each class, and class means that count frequencies.

    METAFLEET_DATA=FOLDER python -m benchmarks.unequal.run [--out build/unequal]      writes result.json and the page

The runs of ``draws.toml`` resume. The figures of frequencies are those of ``benchmarks/auto/result.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.auto.devices import LABELS
from benchmarks.auto.run import HERE as AUTO
from benchmarks.auto.run import ROLES
from benchmarks.papers.run import told
from cloud_server.laboratory.advise.candidates import score
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.base import storage

HERE = Path(__file__).parent
WAYS = {"means": "all alike", "proto": "frequent ones likelier"}
SET = "heart beats"


def runs(out: Path) -> dict[str, dict[str, list[float]]]:
    """Label -> measure -> its values by seed, on the validation devices."""
    found: dict[str, dict[str, list[float]]] = {}
    asked = experiments.load(HERE / "draws.toml")
    for folder in simulate(asked, out, Options(jobs=1, device="cpu"), on_round=told("draws")):
        run = finished_runs.read(folder / "result.json")
        figures = found.setdefault(run.label, {})
        new = next(scores for name, scores in run.last.items() if name.startswith("new"))
        for name, value in (("both", score(run)), ("f1", run.last["devices"]["macro_f1"]), ("new f1", new["macro_f1"]),
                            ("accuracy", run.last["devices"]["mean"]), ("new accuracy", new["mean"])):
            figures.setdefault(name, []).append(round(value, 4))
    return found


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    return {"draws": _draws(result), "frequencies": _frequencies()}


def _draws(result: Mapping[str, Any]) -> str:
    head = ("method, draws", "macro-F1, all", "macro-F1", "accuracy", "new: macro-F1", "new: accuracy")
    keys = ("both", "f1", "accuracy", "new f1", "new accuracy")
    return markdown.table(head, ((label, *(", ".join(f"{value:.3f}" for value in one[key]) for key in keys))
                                 for label, one in sorted(result.items())))


def _frequencies() -> str:
    found = json.loads((AUTO / "result.json").read_text(encoding="utf-8"))
    head = ("devices", "labels", "classes", "accuracy", "macro-F1", "worst device", "calibration error")
    return markdown.table(head, (
        (role, labels, name, *(_cell(found[role][labels][way][SET][figure])
                               for figure in ("accuracy", "macro_f1", "worst", "calibration_error")))
        for role in ROLES for labels in LABELS for way, name in WAYS.items()
    ))


def _cell(mean_and_spread: list[float]) -> str:
    mean, spread = mean_and_spread
    return f"{100 * mean:.1f} ± {100 * spread:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/unequal"))
    result = runs(parser.parse_args().out)
    storage.write_json(HERE / "result.json", result)
    page = HERE / "README.md"
    storage.write_atomic(page, markdown.filled(page.read_text(encoding="utf-8"), tables(result)).encode())


if __name__ == "__main__":
    main()
