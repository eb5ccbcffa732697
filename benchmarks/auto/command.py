"""What ``edge-agent personalize --by auto`` costs, beside the single ways, each in a process of its own.

    python -m benchmarks.auto.command        Linux; writes command.json and the page

Processor seconds and the largest process's highest memory of the whole command, from its start to its end, medians of
``REPEATS`` in turn. Each begins without stored embeddings. ``none`` embeds nothing: it shows what a command costs that
only opens the model. The four models and their constructed samples are those of ``benchmarks/on_device``; times depend
on shapes alone.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.on_device import homes
from benchmarks.on_device.cases import CASES
from benchmarks.on_device.memory import AGENT, launched
from cloud_server.results.result import environment
from fleet_core.base import storage

RESULT = "command.json"
SINGLE = ("proto", "head", "knn")
WAYS = ("none", *SINGLE, "auto", "adapt")
SAMPLES = (50, 500)
REPEATS = 5


def measured(home: Path, room: Path, repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """way -> cpu_s and peak (bytes) of personalizing a copy of ``home``, which has no embeddings, below ``room``."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way, each in runs.items():
            shutil.copytree(home, room / "copy")
            cost = launched([*AGENT, "personalize", "--by", way, "--home", str(room / "copy")])
            shutil.rmtree(room / "copy")
            if repeat:  # the first run fills the disk cache
                each.append(cost)
    return {way: {key: statistics.median(one[key] for one in each) for key in ("cpu_s", "peak")}
            for way, each in runs.items()}


def table(models: Mapping[str, Any]) -> str:
    head = ("model", "samples", *(f"{way}, s" for way in WAYS), "auto ÷ dearest", "single, MB", "auto, MB", "adapt, MB")
    rows = []
    for name in CASES:
        for samples, found in models.get(name, {}).items():
            seconds, mb = ({way: found[way][key] * by for way in WAYS} for key, by in (("cpu_s", 1), ("peak", 1e-6)))
            ratio = seconds["auto"] / max(seconds[way] for way in SINGLE)
            rows.append((name, samples, *(f"{seconds[way]:.2f}" for way in WAYS), f"{ratio:.2f}",
                         *(f"{one:.0f}" for one in (max(mb[way] for way in SINGLE), mb["auto"], mb["adapt"]))))
    return markdown.table(head, rows)


def main() -> None:
    from benchmarks.auto import run  # imports this file

    found: dict[str, Any] = {}
    for name, case in CASES.items():
        for samples in SAMPLES:
            with tempfile.TemporaryDirectory() as folder:
                place = homes.made(case, Path(folder) / "made", support=samples)
                found.setdefault(name, {})[str(samples)] = measured(place.homes["maml"], Path(folder))
            print(name, samples, json.dumps(found[name][str(samples)]), file=sys.stderr, flush=True)
    storage.write_json(run.HERE / RESULT, {"repeats": REPEATS, "environment": environment(), "models": found})
    storage.write_atomic(run.HERE / "README.md", run.page().encode())


if __name__ == "__main__":
    main()
