"""The libraries of a device on Cortex-A53, A72 and A76: the package with and without torch is unpacked, onnxruntime
gives the golden outputs of a bundle, and torch takes gradient steps or dies of an illegal instruction.

Every card is the untouched image with one package at /srv; no fleet is involved.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arm64 import image, proof
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import Scene
from benchmarks.on_device.cases import CASES, plain
from export.adapt_graph import with_adapt
from export.full_bundle import Served, whole
from firmware_profiles.package import board_needs, program
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.board import catalogue
from fleet_core.learning import models
from fleet_core.personalization import device_bundle

CPUS = {"cortex-a53": ("Cortex-A53", 512), "cortex-a72": ("Cortex-A72", 1024), "cortex-a76": ("Cortex-A76", 2048)}
"""QEMU's name: (the core, memory in MiB of the smallest board that has it)."""
ONNXRUNTIMES = ("1.23.2", "1.31.1")
TORCH = {"2.9.1": ("cortex-a53", "cortex-a72"), "2.10.0": ("cortex-a72", "cortex-a76")}
"""Version of torch: the processors on which it is tried."""
METHOD = "per-fedavg-fo"
SIGILL = 132
"""The shell's exit code of a process that an illegal instruction ended."""
STEPS = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
                          torch.nn.Linear(16 * 14 * 14, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
x, y = torch.linspace(-1, 1, 16 * 3 * 32 * 32).sin().reshape(16, 3, 32, 32), torch.arange(16) % 10
for parameter in net.parameters():
    parameter.data = torch.linspace(-1, 1, parameter.numel()).mul(7).cos().reshape(parameter.shape) / 30
steps = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(5):
    steps.zero_grad()
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    steps.step()
print(torch.__version__, float(loss), float(sum((p.detach().double() ** 2).sum() for p in net.parameters())))
"""
"""Five steps of a small convolutional network, of weights that no generator draws."""


def play(world: Scene, notes: Notes) -> None:
    world.user = "root"
    bundle = world.folder / "cnn.bundle"
    write_bundle(bundle)
    (world.folder / "steps.py").write_text(STEPS)
    here = [float(word) for word in subprocess.run(
        [sys.executable, str(world.folder / "steps.py")], check=True, capture_output=True, text=True
    ).stdout.split()[1:]]
    for version in ONNXRUNTIMES:
        made = package(pins={"onnxruntime": version})
        card(world, made, bundle)
        for cpu, (core, memory_mib) in CPUS.items():
            start(world, notes, cpu, core, memory_mib)
            unpack(world, notes, made, f"without torch, onnxruntime {version}")
            golden(world, notes, version, core)
            world.power_off()
    for version, cpus in TORCH.items():
        made = package(pins={"onnxruntime": ONNXRUNTIMES[0], "torch": version}, torch="torch")
        card(world, made, world.folder / "steps.py")
        for cpu in cpus:
            core, memory_mib = CPUS[cpu]
            start(world, notes, cpu, core, memory_mib)
            unpack(world, notes, made, f"with torch {version}")
            learned(world, notes, version, core, here)
            world.power_off()


def package(pins: Mapping[str, str], torch: str = "") -> program.Program:
    """The program for the system of the emulated boards."""
    board = board_needs.of(catalogue.load("raspberry-pi-3b-plus"), "bookworm")
    return program.make(replace(board, pins=pins, torch=torch), say=lambda line: None)


def write_bundle(path: Path) -> None:
    """A model with golden outputs of all its graphs: class means, answers, and gradient steps."""
    layout, method = CASES["1-D CNN"].layout(), METHODS[METHOD]
    weights = models.initial(layout, 1)
    served = Served("proof", "0f" * 32, method, method.hyper(), 1, trees.only(weights, method.shared), weights)
    graph = with_adapt(plain(layout), rates=False)
    device_bundle.write(path, whole(served, graph, stored="fp32", data=None, say=lambda line: None))


def card(world: Scene, made: program.Program, *files: Path) -> None:
    """A card that knows of no device, with the program and ``files`` at /srv, on which root may log in."""
    subprocess.run(["cp", "--sparse=always", str(world.base.image), str(world.card)], check=True)
    world.key()
    keys = f"/{world.user}/.ssh"
    image.folder(world.card, keys)
    image.put(world.card, world.folder / "key.pub", keys, "authorized_keys")
    for file in (made.path, *files):
        image.put(world.card, file, "/srv", "program.tar.gz" if file == made.path else file.name)


def start(world: Scene, notes: Notes, cpu: str, core: str, memory_mib: int) -> None:
    world.passed(f"starts as {core}, {memory_mib} MiB")
    machine = world.boot(cpu, memory_mib)
    machine.until(lambda: "login:" in machine.said(), proof.BOOT_S)
    notes.same(f"{core}: the kernel finds that processor", proof.processor(world), core)


def unpack(world: Scene, notes: Notes, made: program.Program, what: str) -> None:
    """Unpacks the program as install.sh does, once for each card, and notes the emulator's seconds."""
    if "here" in world.on_board(f"test -d /opt/metafleet/{made.version} && echo here || true"):
        return
    began = time.monotonic()
    world.on_board("mkdir -p /opt/metafleet && tar -xzf /srv/program.tar.gz -C /opt/metafleet --no-same-owner && "
                   f"ln -sfn {made.version} /opt/metafleet/current && sync", 1800)
    mib = [round(size / 2**20, 1) for size in (made.size_bytes, made.installed_bytes)]
    notes.facts |= {f"package {what}: MiB packed, installed": mib,
                    f"package {what}: unpacked in, emulator's seconds": round(time.monotonic() - began)}


def golden(world: Scene, notes: Notes, version: str, core: str) -> None:
    """The product's own check of a bundle, on the board."""
    told: dict[str, Any] = json.loads(world.on_board(
        "/opt/metafleet/current/bin/edge-agent install /srv/cnn.bundle --unsigned --home $(mktemp -d) --name board "
        "--json", 900))
    passed = told["passed"]
    notes.same(f"onnxruntime {version} on {core}: golden outputs and steps are as they should be",
               passed["onnxruntime"], version)
    notes.facts[f"onnxruntime {version} on {core}: largest error of its graphs"] = max(passed["graphs"].values())


def learned(world: Scene, notes: Notes, version: str, core: str, here: list[float]) -> None:
    """Gradient steps with torch, or its death where the profiles rule it out."""
    told = world.on_board("PYTHONPATH=/opt/metafleet/current/lib python3 /srv/steps.py; echo $?", 1800).split()
    if version == "2.10.0" and core == "Cortex-A72":
        return notes.same(f"torch {version} on {core}: dies of an illegal instruction", int(told[-1]), SIGILL)
    notes.same(f"torch {version} on {core}: five steps end well", (told[0].partition("+")[0], told[-1]), (version, "0"))
    notes.holds(f"torch {version} on {core}: loss and weights are within 1e-4 of those of x86-64",
                np.allclose([float(word) for word in told[1:3]], here, rtol=1e-4))


PROOF = Proof("runtimes", "onnxruntime and torch on Cortex-A53, A72 and A76, and what unpacking them takes", play)
