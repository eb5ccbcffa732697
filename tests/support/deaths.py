"""The death of one actor of a ``World`` at any of its acts: a write to its disk, a row of the ledger, a publish."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.ledger.ledger import Ledger
from fleet_core.base import storage
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from tests.support.inprocess import Killed, World, toy, world
from tests.support.stand_ins import BrokerFaults
from tests.support.world_checks import settled

Plan = dict[int, tuple[str, int]]
"""Number of closed rounds -> an act then: what is done, and how manieth of its kind it is in that round."""


@dataclass
class Death:
    """Ends one actor at its n-th write, row or publish; ``points`` counts them. plan: ends it at these acts instead,
    each in another round of one life, and takes out each that was reached. ``acts`` are those of each round."""

    actor: str
    at: int | None
    w: World
    plan: Plan = field(default_factory=dict)
    points: int = 0
    where: str = ""
    acts: dict[int, list[str]] = field(default_factory=dict)

    def pass_by(self, what: str) -> None:
        if self.w.acting != self.actor:
            return
        closed = self.w.closed()
        acts = self.acts.setdefault(closed, [])
        acts.append(what)
        self.points += 1
        planned = self.plan.get(closed) == (what, acts.count(what))
        if planned:
            del self.plan[closed]
        if planned or self.points == self.at:
            self.where = f"{self.where} {what}".strip()
            raise Killed(what)

    def plans(self, step: int = 1) -> Iterator[Plan]:
        """Plans for lives that die at each act of this undisturbed one, or at each ``step``-th of a round. An act that
        is not reached after the deaths before it comes again in a life of its own."""
        left = {closed: [(acts[n], acts[: n + 1].count(acts[n])) for n in range(0, len(acts), step)]
                for closed, acts in self.acts.items()}
        while any(left.values()):
            several = {closed: acts.pop(0) for closed, acts in left.items() if acts}
            yield several
            for closed, act in several.items():
                alone = {closed: act}
                yield alone
                assert not alone, f"never reached: {alone}"


def run(w: World, death: Death, until: Callable[[], bool], *, steps: int = 1500, tick_s: float = 0.1) -> bool:
    """Steps everybody until ``until`` holds; an actor that dies is started again. False after ``steps`` steps."""
    for _ in range(steps):
        if w.server is not None and until():
            return True
        try:
            w.step(tick_s)
        except Killed:
            w.acting = ""
            if death.actor == "server":
                w.kill_server()
                w.start_server()
            else:
                w.kill_agent(death.actor)
                w.start_agent(death.actor)
    return until()


def founded(folder: Path, text: str, devices: int) -> World:
    """A fleet that has not run yet, and the homes of its devices ``d0`` …"""
    w = world(folder, text)
    for n in range(devices):
        w.start_agent(f"d{n}", toy(n))
    w.close()
    return w


def two_rounds(
    fleet: World, folder: Path, actor: str, at: int | None, devices: int
) -> tuple[World, Death, BrokerFaults, int]:
    """A copy of the fleet, run until its second round has closed; ``actor`` dies at its ``at``-th act. Also returns
    what passed through the broker, and how many acts there were until round 1 had closed."""
    shutil.copytree(fleet.folder, folder)
    faults = BrokerFaults()
    w = World(folder, replace(fleet.fleet, folder=folder / "fleet"), LoopbackBroker(faults=faults))
    death = Death(actor, at, w)
    with pytest.MonkeyPatch.context() as patch:
        deadly(patch, death)
        w.start_server()
        for n in range(devices):
            w.start_agent(f"d{n}")
        assert run(w, death, lambda: w.closed() >= 1), death.where
        first = death.points
        assert run(w, death, lambda: w.closed() == 2 and settled(w)), death.where
    return w, death, faults, first


def deadly(monkeypatch: pytest.MonkeyPatch, death: Death, *, facts: bool = False) -> None:
    """facts: a change of the ledger's facts or requests is an act too."""
    write, put, publish = storage.write_parts, Ledger.put, LoopbackLink.publish
    if facts:
        for name in ("set_facts", "request", "remove_request"):
            monkeypatch.setattr(Ledger, name, _deadly(death, name, getattr(Ledger, name)))

    def write_parts(path: Path, parts: Any, **options: Any) -> None:
        death.pass_by(f"write {re.sub('^made-.*', 'made', path.name)}")  # it has the name of the life that made it
        write(path, parts, **options)

    def put_rows(ledger: Ledger, *rows: Any) -> None:
        death.pass_by(f"row {type(rows[0]).__name__}")
        put(ledger, *rows)

    def publish_message(link: LoopbackLink, topic: str, payload: bytes, **options: Any) -> None:
        death.pass_by(f"publish {topic}")
        publish(link, topic, payload, **options)

    monkeypatch.setattr(storage, "write_parts", write_parts)
    monkeypatch.setattr(Ledger, "put", put_rows)
    monkeypatch.setattr(LoopbackLink, "publish", publish_message)


def _deadly(death: Death, what: str, act: Callable[..., None]) -> Callable[..., None]:
    def acting(*arguments: Any, **options: Any) -> None:
        death.pass_by(what)
        act(*arguments, **options)

    return acting
