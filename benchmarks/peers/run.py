"""PFLlib's methods beside ours: the same devices, samples, networks, first weights and numbers of steps.

    METAFLEET_DATA=CACHE python -m benchmarks.peers.run --pfllib FOLDER [--networks mlp cnn cifar] [--methods NAME ...]
        [--seeds N ...] [--minutes M]

FOLDER is a checkout of https://github.com/TsingZ0/PFLlib, whose code is not ours to ship. Both sides take turns, each
run in a process with one thread: accuracy of the personalized models after the last round, seconds, and the peak of the
process. The first run installs what PFLlib needs (pfllib.txt) into a virtual environment under build/, with torch from
this Python. Writes result.json and the tables of README.md, beside this file; runs that are in result.json are not
repeated. ``--minutes`` starts no further run after M minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from benchmarks import markdown
from benchmarks.overhead.peers.venvs import python_of
from benchmarks.peers import division
from benchmarks.peers import ours as our_side
from benchmarks.peers.methods import METHODS, SETTING, Setting
from benchmarks.peers.network import NETWORKS, SETS
from benchmarks.peers.turns import Side
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, FleetError
from fleet_core.data.sets.set_cache import load_set

HERE = Path(__file__).parent
RESULT, BY_SEED = HERE / "result.json", HERE / "seeds.json"
SIDES = ("ours", "PFLlib")
ROUNDS = {"mlp": 10, "cnn": 3, "cifar": 5}
MINUS = "\N{MINUS SIGN}"

Row = dict[str, Any]


def checkout(folder: Path | None) -> Path:
    """The folder of PFLlib. Raises ConfigError."""
    needed = "system/flcore/servers/serverbase.py"
    if folder is None or not (folder / needed).is_file():
        raise ConfigError(
            "PFLlib is not given" if folder is None else f"{folder} has no {needed}",
            expected="--pfllib FOLDER, a checkout of PFLlib",
            hint="git clone https://github.com/TsingZ0/PFLlib",
        )
    return folder.resolve()


def prepared(folder: Path, setting: Setting, networks: Iterable[str], seeds: Iterable[int]) -> None:
    """Samples and first weights, for both sides."""
    networks = list(networks)
    for name in sorted({SETS[network] for network in networks}):
        images = load_set(name)
        assert images.test is not None
        division.write(division.divided(images.train, images.test, (setting.train, setting.test)), folder / name)
    for network, seed in itertools.product(networks, seeds):
        first = our_side.first_weights(folder, network, seed)
        np.savez(folder / SETS[network] / f"first-{network}-{seed}.npz", *first)


def commands(pfllib: Path, folder: Path) -> dict[str, list[str]]:
    return {
        "ours": [sys.executable, "-m", "benchmarks.peers.ours", str(folder)],
        "PFLlib": [str(python_of("pfllib", HERE)), "-m", "benchmarks.peers.theirs", str(pfllib), str(folder)],
    }


def read(path: Path = RESULT) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {"runs": []}


def same(row: Row, key: Mapping[str, Any]) -> bool:
    return all(row[name] == value for name, value in key.items())


# The page -------------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation."""
    mean = f"{fmean(values):.{digits}f}"
    return f"{mean} ± {stdev(values):.{digits}f}" if len(values) > 1 else mean


def tables(rows: Sequence[Row], published: Mapping[str, Any]) -> dict[str, str]:
    """A table for each network, and PFLlib's published figures."""
    columns = ("method", *(f"PFLlib, {column}" for column in published["columns"]))
    figures = {method: (f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in values)
               for method, values in published["rows"].items()}
    return {
        **{network: beside([row for row in rows if row["network"] == network]) for network in NETWORKS},
        "published": markdown.table(columns, [(method, *values) for method, values in figures.items()]),
    }


def beside(rows: Sequence[Row]) -> str:
    """The sides of each method over the seeds that both have, and PFLlib's pFedMe as it evaluates itself."""
    lines = []
    for method in METHODS:
        of = {side: {row["seed"]: row for row in rows if same(row, {"method": method, "side": side})}
              for side in SIDES}
        seeds = sorted(set(of["ours"]) & set(of["PFLlib"]))
        if not seeds:
            continue
        own, other = ([of[side][seed] for seed in seeds] for side in SIDES)
        costs = [f"{fmean(row[what] for row in side):.0f}" for what in ("cpu_s", "peak_mb") for side in (own, other)]
        lines.append((method, str(len(seeds)), *accuracies(own, other, "accuracy"), *costs))
        if "unchanged" in other[0]:
            lines.append((f"{method}, PFLlib's own evaluation", str(len(seeds)), *accuracies(own, other, "unchanged"),
                          *["" for _ in costs]))
    head = ("method", "seeds", "accuracy in %, ours", "PFLlib", f"ours {MINUS} PFLlib", "CPU s, ours", "PFLlib",
            "peak MB, ours", "PFLlib")
    return markdown.table(head, lines)


def accuracies(own: Sequence[Row], other: Sequence[Row], theirs: str) -> tuple[str, str, str]:
    """In per cent: ours, PFLlib's, and their difference with the same seed."""
    ours, pfllib = [100 * row["accuracy"] for row in own], [100 * row[theirs] for row in other]
    apart = [a - b for a, b in zip(ours, pfllib, strict=True)]
    return spread(ours, 1), spread(pfllib, 1), spread(apart, 1).replace("-", MINUS)


def between_seeds(found: Mapping[str, Sequence[float]]) -> str:
    """FedAvg's accuracies, ours alone: by network, those of the seeds."""
    head = ("network", "rounds", "seeds", "accuracy in %", "lowest", "highest")
    return markdown.table(head, [
        (network, str(ROUNDS[network]), str(len(own)), spread([100 * one for one in own], 1),
         f"{100 * min(own):.1f}", f"{100 * max(own):.1f}")
        for network, own in found.items()
    ])


def page(rows: Sequence[Row]) -> str:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    published, by_seed = (json.loads(path.read_text(encoding="utf-8")) for path in (HERE / "published.json", BY_SEED))
    return markdown.filled(text, {**tables(rows, published), "seeds": between_seeds(by_seed)})


def write(result: Mapping[str, Any]) -> None:
    storage.write_atomic(RESULT, (json.dumps(result, indent=1) + "\n").encode())
    storage.write_atomic(HERE / "README.md", page(result["runs"]).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfllib", type=Path, metavar="FOLDER")
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=["mlp"])
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    ends, setting = time.monotonic() + 60 * options.minutes, SETTING
    try:
        pfllib = checkout(options.pfllib)
        result = {**read(), "setting": asdict(setting), "rounds": ROUNDS}
        with tempfile.TemporaryDirectory() as scratch:
            prepared(Path(scratch), setting, options.networks, options.seeds)
            sides = {name: Side(command) for name, command in commands(pfllib, Path(scratch)).items()}
            for network, seed, method, side in itertools.product(
                options.networks, options.seeds, options.methods, SIDES
            ):
                key = {"network": network, "method": method, "seed": seed}
                if any(same(row, {**key, "side": side}) for row in result["runs"]):
                    continue
                if time.monotonic() > ends:
                    print("the time is up; the same command goes on", file=sys.stderr)
                    break
                found = sides[side].run({**key, "rounds": ROUNDS[network]})
                row = {**key, "side": side, **found, "load": round(os.getloadavg()[0], 1)}
                print(json.dumps(row), file=sys.stderr, flush=True)
                result["runs"].append(row)
                write(result)
            for one in sides.values():
                one.close()
        write(result)
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
