"""The death of one actor of a ``World`` at any of its acts: a write to its disk, a row of the ledger, a publish."""

from __future__ import annotations

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


def deadly(monkeypatch: pytest.MonkeyPatch, death: Death) -> None:
    write, put, publish = storage.write_parts, Ledger.put, LoopbackLink.publish

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
