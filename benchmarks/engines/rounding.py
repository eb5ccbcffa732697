"""Where the demo's fleet ends with each engine, and where it ends when the last digits of its first weights differ.

    metafleet demo --engine onnx --out RUN        # made once, for its fleet and devices
    python -m benchmarks.engines.rounding RUN --out benchmarks/engines/rounding.json

Every run is the whole fleet in one process, from the first round on. ``seed`` 0 has the fleet's first weights; the
others have each value moved by one unit in the last place, up or down at random: what rounding does, and no more.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.figures import scores
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import in_one_process
from fleet_core.base import storage
from fleet_core.board.device_settings import ENGINES, settings_of

SEEDS = 3
LEFT_BEHIND = ("state", "spool")


def ended(run: Path, engine: str, seed: int, folder: Path) -> dict[str, float]:
    """Accuracy and macro-F1 over all devices' answers after the last round."""
    shutil.copytree(run / "fleet", folder / "fleet", ignore=lambda place, names: [
        name for name in names if name in LEFT_BEHIND or name.startswith("ledger")])
    path = folder / "fleet" / "weights.safetensors"
    arrays, facts = storage.unpack(path.read_bytes(), where=str(path))
    rng = np.random.default_rng(seed)
    if seed:
        arrays = {name: np.nextafter(a, np.where(rng.random(a.shape) < 0.5, -np.inf, np.inf).astype(a.dtype))
                  for name, a in arrays.items()}
        storage.write_atomic(path, storage.pack(arrays, facts))
    fleet, devices = Fleet.load(folder / "fleet"), {}
    for home in sorted((run / "devices").iterdir()):
        own = folder / "devices" / home.name
        own.mkdir(parents=True)
        for name in ("device.toml", "samples.npz"):
            shutil.copy2(home / name, own / name)
        settings = settings_of(own)
        devices[home.name] = own, replace(settings, train=replace(settings.train, engine=engine))
    in_one_process.run(fleet, devices)
    with Ledger(fleet.ledger_path, create=False) as ledger:
        rows = [row for row in ledger.rows(Evaluation, round=fleet.config.fleet.rounds) if row.stage == "after"]
        counts = np.sum([row.confusion for row in rows], axis=0).tolist()
        losses = [row.loss for row in ledger.rows(Update, round=fleet.config.fleet.rounds) if row.loss is not None]
    accuracy, f1 = scores.confusion_accuracy(counts), scores.macro_f1(counts, classes_present_only=False)
    return {"accuracy": accuracy or 0.0, "macro_f1": f1 or 0.0, "loss": statistics.fmean(losses)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, list[Any]] = {engine: [] for engine in ENGINES}
    for seed in range(SEEDS):
        for engine, rows in found.items():
            with tempfile.TemporaryDirectory() as folder:
                rows.append(ended(options.run, engine, seed, Path(folder)))
    storage.write_json(options.out, found)


if __name__ == "__main__":
    main()
