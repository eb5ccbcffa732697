"""The aggregator's side of secure aggregation in the open round (``fleet_core.privacy.secure_sum``): asks devices for
each step, waits for their answers, and computes the sum.

A session is in memory only. A restarted aggregator begins another one. If it had asked devices to reveal shares, the
round is not counted instead, because the difference between the sums of two sessions could reveal single updates.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Collection, Iterator

import numpy as np

from cloud_server.broadcast.open_round import OpenRound, Rounds
from cloud_server.identity import authorities
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.spool import Spool
from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.base import storage, trees
from fleet_core.base.errors import MessageError
from fleet_core.codecs import vector
from fleet_core.codecs.kinds import common_scale
from fleet_core.model.layout import Layout
from fleet_core.privacy import masks
from fleet_core.privacy.masks import Array
from fleet_core.privacy.secure_collector import Collector
from fleet_core.privacy.secure_sum import Session
from fleet_core.protocol import certificates, messages
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.secure_messages import (
    KEYS,
    REVEALED,
    SHARES,
    Revealed,
    SealedShares,
    SecureRules,
    SignedKeys,
)

MASKED = "masked"
"""Stands in an update's manifest in place of a codec."""
AGAIN_S = 2.0
FACT = "unmasking"
"""Key in the ledger: the round whose devices were last asked to reveal shares."""
RESTARTED = "not counted: the aggregator was restarted, or could not read an update, while the sum was unmasked"
LOST = {"shares": "sent keys and no shares", "masked": "sent shares and no masked update",
        "unmask": "sent a masked update and revealed no shares"}


class SecureRounds:
    """layout: the layout of the arrays that are sent. attest(device, message): sends a signed message.
    expected(device): whether a message from it may still arrive."""

    def __init__(
        self, fleet: Fleet, layout: Layout, ledger: Ledger, spool: Spool, rounds: Rounds,
        attest: Callable[[str, Down], None], *, expected: Callable[[str], bool], clock: Callable[[], float],
        now: Callable[[], float],
    ):
        self._section, self._name, self._method = fleet.config.privacy, fleet.config.fleet.name, fleet.method
        self._most_samples = fleet.config.privacy.most_samples if fleet.method.server.weighted(fleet.hyper) else 0
        self._deadline_s, self._folder = fleet.config.fleet.deadline_s, fleet.folder
        self._layout, self._ledger, self._spool, self._rounds = layout, ledger, spool, rounds
        self._attest, self._expected, self._clock, self._now = attest, expected, clock, now
        self._asked: dict[str, float] = {}

    # One round --------------------------------------------------------------------------------------------------------

    def session(self, number: int, devices: int) -> Collector | None:
        """A new session for a round that asks ``devices`` devices; None if the fleet does not mask updates. Raises
        StateError if the certificate of the fleet's authority is missing."""
        section = self._section
        if not section.secure_aggregation:
            return None
        trusted = authorities.trusted(self._folder)
        texts = [certificates.certificate_text(one) for one in trusted]
        self._asked.clear()
        return Collector(Session(self._name, number, SecureRules(
            secrets.token_hex(16), section.threshold, section.least, section.neighbours_of(devices), section.exponent,
            masks.bits_for(devices), texts[0], "".join(texts[1:]), self._most_samples,
        )), tuple(trusted))

    def interrupted(self, number: int) -> bool:
        """Whether an earlier aggregator ended while it was unmasking the sum of round ``number``."""
        return self._ledger.fact(FACT) == str(number)

    def group(self, opened: OpenRound) -> None:
        """Begins the second step; call it when enough keys have arrived. Raises MessageError."""
        assert opened.secure is not None
        opened.secure.start_sharing()
        self._begin(opened)

    def go_on(self, opened: OpenRound) -> bool:
        """Begins the next step once no further answer to the present one is expected. True when the sum can be
        computed. Raises MessageError with the reason if it cannot be computed any more."""
        collector = opened.secure
        assert collector is not None
        phase = collector.phase
        if phase == "unmask" and collector.complete:
            return True
        answered, asked = self._answered(opened, collector)
        missing = [name for name in asked if name not in answered]
        lost = {*opened.failed, *collector.restarted}
        waiting = [name for name in missing if name not in lost and self._expected(name)]
        if waiting and self._clock() <= opened.deadline:
            self._ask(opened, collector, waiting)
            return False
        for name in missing:
            if name not in opened.failed:
                opened.fail(name, LOST[phase])
        if phase == "unmask":
            raise MessageError(f"{len(answered)} of {len(asked)} devices revealed shares", expected="the threshold")
        if phase == "shares":
            collector.start_masking()
        else:
            self._ledger.set_facts(**{FACT: str(opened.number)})
            collector.start_unmasking(opened.received)
        self._begin(opened)
        return False

    def _answered(self, opened: OpenRound, collector: Collector) -> tuple[Collection[str], Collection[str]]:
        """(devices that have answered the present step, devices that were asked)."""
        if collector.phase == "shares":
            return collector.shares, collector.graph
        if collector.phase == "masked":
            return opened.received, collector.senders
        return collector.revealed, collector.there

    def _begin(self, opened: OpenRound) -> None:
        opened.extend(self._clock() + self._deadline_s)
        self._asked.clear()
        assert opened.secure is not None
        self._ask(opened, opened.secure, self._answered(opened, opened.secure)[1])

    def _ask(self, opened: OpenRound, collector: Collector, names: Collection[str]) -> None:
        """Asks each of ``names`` for its next step, at most once every ``AGAIN_S``."""
        for name in names:
            step = collector.step(name)
            if step is not None and self._clock() - self._asked.get(name, -AGAIN_S) >= AGAIN_S:
                self._asked[name] = self._clock()
                self._attest(name, Down("secure", opened.number, device=name, secure=step))

    # What arrives -----------------------------------------------------------------------------------------------------

    def on_message(self, device: str, number: int, part: str, payload: bytes) -> None:
        """Raises MessageError for a message that is refused."""
        opened = self._rounds.open
        if opened is None or opened.secure is None or number != opened.number or device not in opened.cohort:
            return
        if part == KEYS:
            now = datetime.datetime.fromtimestamp(self._now(), datetime.timezone.utc)
            opened.secure.add_keys(device, messages.decode(SignedKeys, payload), now)
        elif part == SHARES:
            opened.secure.add_shares(device, messages.decode(SealedShares, payload))
        elif part == REVEALED:
            opened.secure.add_revealed(device, messages.decode(Revealed, payload))

    @staticmethod
    def refusal(opened: OpenRound, device: str, session: str) -> str:
        """Why an update is refused: it is masked for another session, not masked, or not expected. Empty if
        accepted."""
        collector = opened.secure
        if collector is None:
            return "" if not session else "a masked update, expected one that is not"
        if session != collector.session.rules.session:
            return "masked for another sum" if session else "an update that is not masked"
        expected = collector.phase == "masked" and device in collector.senders
        return "" if expected else "this device is not in the sum, or too late for it"

    def check_size(self, opened: OpenRound, data: bytes) -> None:
        """Raises MessageError for a masked update of the wrong size."""
        assert opened.secure is not None
        expected = self._values(opened) * opened.secure.session.rules.bits // 8
        if len(data) != expected:
            raise MessageError(f"a masked update of {len(data)} bytes", expected=str(expected))

    def max_bytes(self) -> int:
        """The largest size of a masked update."""
        return 4 * (self._layout.parameters(self._method.shared) + self._digits)

    # The sum ----------------------------------------------------------------------------------------------------------

    def updates(self, opened: OpenRound) -> list[Update]:
        """One update for each device, in closing order: the first is the sum of all, or their mean if they are weighted
        by samples, the others are zero; float64. All have the mean of the scalars.
        Raises MessageError if there is no sum, StateError for a masked update that cannot be read."""
        collector = opened.secure
        assert collector is not None
        names = aggregation.order(collector.there)
        lacking = [name for name in names if name not in opened.received]
        if lacking:
            raise MessageError(f"the masked update of {lacking[0]} was dropped while the sum was unmasked")
        total, rules = collector.total(self._masked(opened, names)), collector.session.rules
        values = total[: total.size - self._digits] * 2.0**rules.exponent
        means = common_scale.means(total[values.size:], len(names))
        samples = 0
        if rules.most_samples:
            weights = means.pop() * len(names) / common_scale.FULL
            if weights <= 0:
                raise MessageError("weights that add up to nothing: a device did not follow the protocol")
            values, samples = values / weights, 1
        part = self._layout.part(opened.arrays.moving)
        whole = part.ordered(storage.unflatten(vector.divided(values, part.shapes(self._method.shared))))
        first, scalars = trees.zeros_like(whole), dict(zip(self._method.up_scalars, means, strict=True))
        return [Update(name, Payload(first if k else whole, scalars), 0 if k else samples)
                for k, name in enumerate(names)]

    def _masked(self, opened: OpenRound, names: Collection[str]) -> Iterator[Array]:
        assert opened.secure is not None
        kind = masks.dtype(opened.secure.session.rules.bits)
        for name in names:
            yield np.frombuffer(self._spool.data(opened.number, name, opened.received[name]), kind)

    def _values(self, opened: OpenRound) -> int:
        return self._layout.part(opened.arrays.moving).parameters(self._method.shared) + self._digits

    @property
    def _digits(self) -> int:
        """Values that stand for the numbers beside the arrays."""
        return common_scale.DIGITS * (len(self._method.up_scalars) + bool(self._most_samples))
