"""A fleet's folder with a generated ledger of any number of devices and rounds, to view on the console."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Energy, Evaluation, Round, RoundCodec, Row, Traffic, Update

PLACES = ("attic", "barn", "cellar", "dairy", "garden", "greenhouse", "kitchen", "loft", "mill", "orchard", "porch",
          "pump", "shed", "silo", "stable", "well")
BOARDS = ((512, "Raspberry Pi Zero 2 W Rev 1.0", "onnx"), (1024, "Raspberry Pi 3 Model B Plus Rev 1.3", "torch"),
          (4096, "Raspberry Pi 4 Model B Rev 1.4", "torch"))
SETTINGS = """\
[fleet]
name = "{name}"
method = "pfldyn-proto"
rounds = {rounds}
serve_every = 3

[model]
name = "cnn1d"
classes = ["frost", "dry", "fine"]
input = {{ shape = [2, 64] }}

[budget]
bytes = {bytes}
target_accuracy = 0.9
"""
UP, DOWN = 7_264, 7_412


def names(count: int) -> list[str]:
    return [f"{PLACES[k % len(PLACES)]}-{k // len(PLACES) + 1:02d}" for k in range(count)]


class MadeFleet:
    """The fleet in ``folder``. closed: rounds that it has had; ``play`` adds one at a time."""

    def __init__(self, folder: Path, devices: int, closed: int, rounds: int, *, seed: int = 0):
        folder.mkdir(parents=True)
        self.folder, self.names, self._random = folder, names(devices), np.random.default_rng(seed)
        budget = 2.0 * devices * rounds * (UP + DOWN)
        (folder / "fleet.toml").write_text(SETTINGS.format(name="greenhouse", rounds=rounds, bytes=budget))
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.round, self.at = 0, time.time() - 95.0 * closed
        self._skill = {name: float(self._random.uniform(-0.05, 0.05)) for name in self.names}
        self._metered = {name: bool(self._random.random() < 0.7) for name in self.names}
        self.ledger.set_facts(name="greenhouse", method="pfldyn-proto")
        self.ledger.put(*(self._device(k, name) for k, name in enumerate(self.names)))
        with self.ledger.transaction():
            for _ in range(closed):
                self.play()

    def write_inventory(self) -> None:
        """An inventory of all devices, at addresses that do not exist."""
        lines = []
        for k, name in enumerate(self.names):
            (self.folder / f"{name}.toml").touch()
            address = f"ssh://pi@192.0.2.{k % 250 + 1}:{2200 + k // 250}"
            lines.append(f'[[devices]]\nfile = "{name}.toml"\nto = "{address}"\n')
        (self.folder / "inventory.toml").write_text("\n".join(lines))

    def reopen(self) -> None:
        """Opens the ledger in this thread, after ``ledger.close()`` in the one that made the fleet."""
        self.ledger = Ledger(self.folder / "ledger.sqlite")

    def _device(self, k: int, name: str) -> Device:
        ram, board, engine = BOARDS[k % len(BOARDS)]
        said = {"st": "on", "ram": ram, "train": k % 11 != 7, "codecs": ["fp32", "int8"], "board": board,
                "engines": [engine]}
        if k % 13 == 4:
            del said["board"]  # an agent of an earlier version
        return Device(
            name=name, state="off" if k % 17 == 5 else "on", first_seen=self.at + k / 10, last_seen=self.at + 60,
            phase=("idle", "training", "idle", "serving")[k % 4], version="0.1.0", took_part=True, capabilities=said,
            cannot="float: no room for the model" if k % 37 == 30 else None,
        )

    def play(self) -> None:
        """One more round, in which one in forty devices is refused or silent."""
        self.round, self.at = self.round + 1, self.at + 95.0
        rows: list[Row] = [
            Round(round=self.round, opened_at=self.at, closed_at=self.at + 41, cohort=tuple(self.names),
                  members=len(self.names), models_transmitted=2.0 * len(self.names), seconds=41.0,
                  loss=0.18 + 0.9 * math.exp(-self.round / 6), status="closed", served_id=f"m{self.round // 3 * 3}"),
            *(RoundCodec(round=self.round, way=way, codec="int8") for way in ("up", "down")),
        ]
        for name in self.names:
            rows += self._of_device(name)
        self.ledger.put(*rows)

    def _of_device(self, name: str) -> list[Row]:
        chance = self._random.random()
        if chance < 0.01:
            return []
        refused = chance < 0.025
        rows: list[Row] = [
            Update(round=self.round, device=name, update_id=f"{name}-{self.round}", samples=120, loss=0.4,
                   payload_bytes=UP, chunks=1, received_at=self.at + 5 + 30 * self._random.random(),
                   status="refused" if refused else "counted", reason="the norm 12000 is above 10000" * refused),
            Traffic(round=self.round, device=name, direction="up", kind="update", payload_bytes=UP, mqtt_bytes=UP + 420,
                    wire_bytes=UP + 1600),
            Traffic(round=self.round, device=name, direction="down", kind="model", payload_bytes=DOWN,
                    mqtt_bytes=DOWN + 610, wire_bytes=DOWN + 2100),
        ]
        if self._metered[name]:
            source = "linear model of CPU time"
            for phase, joules in (("train", 3.1), ("radio", 0.4), ("idle", 60.0)):
                value = joules * float(self._random.uniform(0.9, 1.1))
                rows.append(Energy(round=self.round, device=name, phase=phase, joules=value, source=source,
                                   measured=False, low=0.8 * value, high=1.25 * value))
        if self.round % 3 == 0:
            for stage, gain in (("before", 0.0), ("after", 0.08)):
                share = 0.55 + 0.3 * (1 - math.exp(-self.round / 8)) + self._skill[name] + gain
                hits = int(np.clip(share + self._random.normal() / 60, 0, 1) * 60)
                right = [(hits + k) // 3 for k in range(3)]  # of 20 samples of each class
                counts = tuple(tuple(right[j] if k == j else (20 - right[j]) * (k == (j + 1) % 3) for k in range(3))
                               for j in range(3))
                rows.append(Evaluation(round=self.round, device=name, stage=stage, method="proto", confusion=counts,
                                       accuracy=hits / 60, macro_f1=hits / 60))
        return rows
