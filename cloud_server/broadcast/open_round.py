"""The open round, and the rounds as the ledger holds them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from cloud_server.broadcast.delta_chain import DeltaChain
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from fleet_core.algorithms.interface import Method
from fleet_core.base.trees import Params
from fleet_core.model import choose_codec
from fleet_core.model.choose_codec import Choice
from fleet_core.model.choose_frozen import Chosen
from fleet_core.model.skipped_updates import is_note
from fleet_core.privacy.secure_collector import Collector
from fleet_core.protocol.round_messages import ModelRef, UploadManifest
from fleet_core.robust.norm_bound import Measure


@dataclass
class OpenRound:
    """One round between its opening and its closing. Received updates are in the spool too.

    opened_at: Unix seconds. deadline: on the aggregator's clock. model: as announced. published: its decoded float32
    weights, which devices hold. lost: what a lossy codec left out of them, or None. scalars: sent with the model.
    chain: of deltas to the model. per_device: float32 groups that each device of the cohort alone receives; empty for
    most methods. codecs: way -> codec, with the reason. left: of the model, as in ``models_down.Encoded``. least_norm:
    below it an update is skipped. arrays: what the round trains, with the reason. secure: the session in which masked
    updates are summed; None if updates are not masked.
    received: device -> its update. measures: device -> the measures of its update. failed: device -> why it will send
    none.
    """

    number: int
    cohort: tuple[str, ...]
    opened_at: float
    deadline: float
    model: ModelRef
    published: Params
    lost: Params | None
    scalars: Mapping[str, float]
    chain: DeltaChain
    per_device: Mapping[str, Params] = field(default_factory=dict)
    codecs: Mapping[str, Choice] = field(default_factory=dict)
    left: float | None = None
    least_norm: float = 0.0
    arrays: Chosen = field(default_factory=Chosen)
    secure: Collector | None = None
    received: dict[str, UploadManifest] = field(default_factory=dict)
    measures: dict[str, Measure] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def skipped(self) -> int:
        """How many devices said that they have nothing to send."""
        return sum(is_note(manifest.codec) for manifest in self.received.values())

    @property
    def delivered(self) -> Collection[str]:
        """The devices that sent their update; with masked updates, those that are ready to send it."""
        return self.received if self.secure is None else self.secure.keys

    @property
    def answered(self) -> bool:
        """Whether every device of the cohort has sent an update or failed."""
        return len(self.delivered) + len(self.failed) >= len(self.cohort)

    def receive(self, device: str, manifest: UploadManifest, measure: Measure) -> None:
        """Notes that the device's update is verified and in the spool."""
        self.received[device], self.measures[device] = manifest, measure
        self.failed.pop(device, None)

    def fail(self, device: str, reason: str) -> None:
        """Notes that the device will send no update, or that its update was refused. Ignores devices outside the
        cohort."""
        if device in self.cohort:
            self.failed[device] = reason

    def withdraw(self, device: str, reason: str) -> UploadManifest | None:
        """Removes a device's update from the round; returns its manifest if one was received. The caller drops it from
        the spool."""
        self.measures.pop(device, None)
        self.fail(device, reason)
        return self.received.pop(device, None)

    def try_again(self) -> None:
        """Lets devices that failed send an update."""
        self.failed.clear()

    def extend(self, deadline: float) -> None:
        self.deadline = deadline


class Rounds:
    """One fleet's rounds. now: Unix seconds. ``open``: the open round, or None. ``stalled``: why the open round does
    not end, or empty."""

    def __init__(self, ledger: Ledger, method: Method, now: Callable[[], float]):
        self._ledger, self._method, self._now = ledger, method, now
        self.open: OpenRound | None = None
        self.stalled = ledger.facts().get("stalled", "")
        self._open_rows = {row.round: row for row in ledger.rounds("open")}

    def interrupted(self, number: int) -> Round | None:
        """The row of a round that was opened and not closed, because of a restart or to reopen it."""
        return self._open_rows.get(number)

    def cohort(self, number: int) -> set[str]:
        """The devices that were asked in a round; empty for a round that was never opened."""
        rows = self._ledger.rows(Round, round=number)
        return set(rows[0].cohort) if rows else set()

    def begin(self, opened: OpenRound, members: int) -> None:
        self._put(Round(
            round=opened.number, opened_at=opened.opened_at, cohort=opened.cohort, members=members,
            model_id=opened.model.model,
        ))

    def replace_cohort(self, number: int, cohort: tuple[str, ...]) -> None:
        """Gives an open round another cohort; the round must then be reopened."""
        self._put(replace(self._open_rows[number], cohort=cohort))

    def close(self, opened: OpenRound, members: int, *, uncounted: str = "") -> None:
        """uncounted: why none of its updates is counted, or empty."""
        row = self._open_rows[opened.number]
        self._put(replace(
            row, status="closed", closed_at=self._now(), members=members, seconds=self._now() - row.opened_at,
            loss=choose_codec.mean_of_known(m.metrics.get("loss") for m in opened.received.values()),
            models_transmitted=float(len(opened.received) * (self._method.models_down + self._method.models_up)
                                     - opened.skipped * self._method.models_up),
            note="; ".join([*filter(None, [uncounted]),
                            *(f"{name}: {why}" for name, why in sorted(opened.failed.items()))]),
        ))

    def abandon(self, opened: OpenRound) -> None:
        """Marks a round as abandoned, because every device of its cohort was revoked."""
        note = "every device of the cohort was revoked"
        self._put(replace(self._open_rows[opened.number], status="abandoned", note=note))

    def _put(self, row: Round) -> None:
        self._ledger.put(row)
        self._open_rows.pop(row.round, None)
        if row.status == "open":
            self._open_rows[row.round] = row

    def say_stalled(self, text: str) -> None:
        """Records why the open round does not end, for ``server status``; empty once it goes on."""
        if text != self.stalled:
            self.stalled = text
            self._ledger.set_facts(stalled=text)
