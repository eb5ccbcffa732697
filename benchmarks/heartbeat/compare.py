"""What personalization brings on heart beats: one live ``metafleet demo`` per seed, and the figures side by side.

    python benchmarks/heartbeat/compare.py --seeds 0 1 2 --out benchmarks/heartbeat/ten.json
    python benchmarks/heartbeat/build.py --all all.npz
    python benchmarks/heartbeat/compare.py --seeds 0 1 2 --data all.npz --devices 15 --new-devices 7 \\
        --support-seconds 300 --out benchmarks/heartbeat/twenty-two.json

The first is the demo with its defaults: eight patients train, two join at the end. The second takes every patient of
the source set. The figure is macro-F1 over N, S and V on the pooled evaluated beats; two to three minutes per seed on
two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from fleet_core.base.storage import write_json

STAGES = ("before", "fine_tuned", "after")
GROUPS = ("evaluated", "new_devices")


def demo(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """result.json of one demo."""
    learns = [] if options.support_seconds is None else ["--support-seconds", str(options.support_seconds)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable, "-m", "cloud_server.commands.cli", "demo", "--seed", str(seed), "--data", options.data,
                "--devices", str(options.devices), "--new-devices", str(options.new_devices), "--rounds",
                str(options.rounds), "--method", options.method, *learns, "--out", str(Path(folder) / "run"),
            ],
            check=True,
        )
        outcome: dict[str, Any] = json.loads((Path(folder) / "run" / "result.json").read_text())
    return outcome


def figures(outcome: dict[str, Any]) -> dict[str, dict[str, float]]:
    """group -> stage -> pooled macro-F1."""
    return {
        group: {
            stage: (outcome[group] if stage == "after" else outcome[group][stage])["macro_f1"]
            for stage in STAGES
            if stage == "after" or stage in outcome[group]
        }
        for group in GROUPS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", default="heartbeat")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--new-devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--method", default="pfldyn-proto")
    parser.add_argument("--support-seconds", type=float)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        outcome = demo(options, seed)
        runs.append({"seed": seed, "macro_f1": figures(outcome), "totals": outcome["totals"],
                     "personalization": outcome["personalization"], "environment": outcome["environment"]})
    means = {
        group: {stage: mean(run["macro_f1"][group][stage] for run in runs) for stage in runs[0]["macro_f1"][group]}
        for group in GROUPS
    }
    write_json(options.out, {
        "method": options.method, "data": Path(options.data).name, "devices": options.devices,
        "new_devices": options.new_devices, "rounds": options.rounds, "mean_macro_f1": means, "runs": runs,
    })
    for group in GROUPS:
        for run in runs:
            print(f"{group:12} seed {run['seed']}  " + row(run["macro_f1"][group]))
        print(f"{group:12} mean    " + row(means[group]))


def row(by_stage: dict[str, float]) -> str:
    return "  ".join(f"{stage} {value:.3f}" for stage, value in by_stage.items())


if __name__ == "__main__":
    main()
