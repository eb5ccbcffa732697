"""How far apart FedAvg's accuracies lie that differ by the seed alone: first weights and the order of the samples.

    METAFLEET_DATA=CACHE python -m benchmarks.peers.seeds

Our side alone; it needs no PFLlib. Writes seeds.json and the tables of README.md, beside this file.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.peers import ours, run
from benchmarks.peers.methods import SETTING
from benchmarks.peers.network import NETWORKS
from fleet_core.base import storage

SEEDS = range(6)


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        run.prepared(Path(scratch), SETTING, NETWORKS, seeds=())
        for network in NETWORKS:
            for seed in SEEDS:
                accuracy = ours.run(Path(scratch), "FedAvg", network, seed, run.ROUNDS[network])["accuracy"]
                print(f"{network}, seed {seed}: {accuracy:.3f}", file=sys.stderr, flush=True)
                found.setdefault(network, []).append(accuracy)
    storage.write_json(run.BY_SEED, found)
    run.write(run.read())


if __name__ == "__main__":
    main()
