"""Devices that do not send what they trained, in a fleet in one process and in a simulation."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.codecs.interface import Seed
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.model.payloads import Sent
from tests.support.inprocess import World, config_text, toy, world


def started(
    folder: Path, robust: str, *, devices: int, fewest: int, rounds: int, method: str = "pfldyn-proto", link: str = "",
    every: int | None = None,
) -> World:
    """A fleet whose ``devices`` are on. robust: lines of its table. fewest: devices with which a round begins. every:
    rounds between two served models, by default all."""
    text = config_text(method, rounds=rounds, devices=fewest, link=f'up = "fp32"\n{link}',
                       fleet="quorum = 1.0\ndeadline_s = 1e6")
    text = text.replace(f"serve_every = {rounds}", f"serve_every = {every or rounds}")
    w = world(folder, f"{text}\n[robust]\n{robust}\n")
    w.start_server()
    for n in range(devices):
        w.start_agent(f"d{n}", toy(n))
    return w


def lie(patch: pytest.MonkeyPatch, factors: Mapping[str, float]) -> None:
    """From now on each of these devices sends its update times its factor, and keeps the state of what it trained."""
    honest, by_seed = payloads.send, {zlib.crc32(name.encode()): factor for name, factor in factors.items()}

    def send(
        name: str, own: Params, residual: Params | None, layout: Layout, groups: tuple[str, ...], seed: Seed = (0,),
        least_norm: float = 0.0,
    ) -> Sent:
        factor: Any = by_seed.get(seed[-1], 1.0)
        return honest(name, trees.scale(own, factor), residual, layout, groups, seed, least_norm)

    patch.setattr(payloads, "send", send)
