"""The death of one actor of a ``World`` at any of its acts: a write to its disk, a row of the ledger, a publish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloud_server.ledger.ledger import Ledger
from fleet_core.base import storage
from fleet_core.link.loopback import LoopbackLink
from tests.support.inprocess import Killed, World


@dataclass
class Death:
    """Ends one actor at its n-th write, row or publish; ``points`` counts them."""

    actor: str
    at: int | None
    w: World
    points: int = 0
    where: str = ""

    def pass_by(self, what: str) -> None:
        if self.w.acting == self.actor:
            self.points += 1
            if self.points == self.at:
                self.where = what
                raise Killed(what)


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


def deadly(monkeypatch: pytest.MonkeyPatch, death: Death, *, facts: bool = False) -> None:
    """facts: a change of the ledger's facts or requests is an act too."""
    write, put, publish = storage.write_parts, Ledger.put, LoopbackLink.publish
    if facts:
        for name in ("set_facts", "request", "remove_request"):
            monkeypatch.setattr(Ledger, name, _deadly(death, name, getattr(Ledger, name)))

    def write_parts(path: Path, parts: Any, **options: Any) -> None:
        death.pass_by(f"write {path.name}")
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
