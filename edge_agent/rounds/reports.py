"""What the agent sends to the aggregator: presence, heartbeats, reports, answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from edge_agent.connection.blob_download import MISSING
from edge_agent.connection.broker_login import has_certificate
from edge_agent.connection.update_upload import UNANSWERED
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.version import running
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.backoff import Backoff
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.link.interface import Link, send
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import MAX_BOARD, Answer, Presence, Report, UpdateState

HEARTBEAT_S = 2.0
LOOK_S = 5.0
UNHEARD_S, LONGEST_UNHEARD_S = 4.0, 300.0
WORKING = ("train", "upload")


class Reporter:
    """trains: whether this device can train. limits: of its board. board: the board's name for people. ``round``: of
    the current manifest; before the first one it is None and nothing is reported. ``said``: the phase of the last
    presence or heartbeat. ``packed``: what the aggregator can read (``messages.encode``)."""

    def __init__(
        self, settings: Settings, boot: str, link: Link, accounts: AgentCosts, *, trains: bool, limits: Limits,
        board: str, clock: Callable[[], float], log: Callable[[str], None],
    ):
        self._settings, self._boot, self._link, self._accounts = settings, boot, link, accounts
        self._trains, self._limits, self._board, self._clock, self._log = trains, limits, board, clock, log
        self._fleet, self._name = settings.device.fleet, settings.device.name
        self._asked: dict[str, tuple[str, float]] = {}
        self._last_heartbeat = clock()
        self._backoff = Backoff(self._name, clock, UNHEARD_S, LONGEST_UNHEARD_S)
        self._heard = False
        self.round: int | None = None
        self.phase = self.said = "idle"
        self.packed = messages.PLAIN

    # Reports ----------------------------------------------------------------------------------------------------------

    def report(self, **more: Any) -> None:
        """Sends costs since the start, with ``more`` fields of ``Report``. Costs alone go at QoS 0: the next report has
        them too."""
        if self.round is None:
            return
        usage = self._accounts.usage()
        report = Report(
            round=self.round,
            boot=self._boot,
            energy=self._accounts.energy(),
            absent_terms=self._accounts.absent_terms(),
            traffic=self._accounts.traffic(self._link.counters.snapshot()),
            flops=self._accounts.flops,
            new=not self._settings.train.enabled,
            cpu_s=usage.cpu_s,
            peak_mib=usage.peak_mib,
            **more,
        )
        data = messages.encode(report, packed=self.packed)
        self._send(topics.report(self._fleet, self._name), data, qos=1 if more else 0)

    def ask(self, what: str, about: str, **more: Any) -> None:
        """Sends a report that asks a question, and repeats it every ``LOOK_S`` seconds until the question changes."""
        asked, when = self._asked.get(what, ("", 0.0))
        if asked != about or self._clock() - when >= LOOK_S:
            self._asked[what] = (about, self._clock())
            self.report(**more)

    def reconnected(self) -> None:
        """Lets questions be asked again on the new connection."""
        self._asked.clear()

    def missing(self, kind: str, times: int) -> None:
        """Asks the aggregator to publish again a retained blob that did not arrive."""
        if times == MISSING:
            self._log(f"{kind}: nothing comes from the broker: it has lost what it retained, or its access control "
                      f"denies this device {topics.blobs(self._fleet)}")
        self.report(want="chunks")

    def unanswered(self, round_number: int) -> None:
        """Logs that offers got no answer: a broker may drop a publish without saying so (with MQTT 3.1.1 always, with
        MQTT 5 at QoS 0)."""
        self._log(f"round {round_number}: no answer to {UNANSWERED} offers: the aggregator is away, or the broker "
                  "drops what this device publishes (its access control, its message size limit)")

    def answer(self, question_id: str, answer: Answer) -> None:
        self._send(topics.answer(self._fleet, self._name, question_id), messages.encode(answer))

    # Presence ---------------------------------------------------------------------------------------------------------

    def announce(
        self, *, layouts: tuple[str, ...], base: str, key: str = "", ca: str = "", again: bool = False,
        update: UpdateState | None = None, moved: int = 0,
    ) -> None:
        """Publishes the presence, retained; ``unheard`` until the aggregator acknowledges it. layouts: hashes of the
        graphs here. base: id of the training model that this device holds. key, ca, moved: as in ``Presence``.
        update: of programs that it fetches."""
        if again:
            self._backoff.repeat()
        else:
            self.forgotten()
        self._last_heartbeat, self.said = self._clock(), self.phase
        presence = Presence(
            st="on",
            boot=self._boot,
            ph=self.phase,
            ver=running(),
            methods={name: method.version for name, method in METHODS.items()},
            codecs=tuple(CODECS),
            layouts=layouts,
            ram=_ram_mib(),
            train=self._trains,
            cannot=self._limits.why[:200],
            most=self._limits.max_parameters or 0,
            base=base,
            chain=True,
            packed=True,
            dictionary=1,
            parts=True,
            private=True,
            secure=has_certificate(self._settings),
            engines=self._limits.engines,
            board=self._board[:MAX_BOARD],
            update=update,
            key=key,
            ca=ca,
            moved=moved,
            demands_secure=self._settings.privacy.secure_aggregation,
            demands_noise=self._settings.privacy.noise_multiplier,
            numbers=has_certificate(self._settings),
        )
        self._send(topics.presence(self._fleet, self._name), messages.encode(presence), retain=True)

    @property
    def unheard(self) -> bool:
        """Whether to publish the presence again: brokers drop messages when many devices connect at once."""
        return not self._heard and self._backoff.expired

    @property
    def known(self) -> bool:
        """Whether the aggregator has acknowledged this agent's start."""
        return self._heard

    def forgotten(self) -> None:
        """The aggregator was restarted and must acknowledge the presence again."""
        self._heard = False
        self._backoff.reset()

    def heard(self, boot: str) -> None:
        """The aggregator acknowledged the presence with this ``boot``."""
        self._heard = self._heard or boot == self._boot

    def leave(self) -> None:
        off = messages.encode(Presence(st="off", boot=self._boot, ver=running()))
        self._send(topics.presence(self._fleet, self._name), off, retain=True)

    def enter(self, phase: str, *, known: bool = False) -> None:
        """Changes the phase and sends a heartbeat. known: the aggregator knows the phase from another message."""
        if phase != self.phase:
            self.phase = phase
            if known:
                self._last_heartbeat = self._clock()
            else:
                self._beat()

    def tick(self) -> None:
        """Sends a heartbeat every two seconds while the device trains or uploads."""
        if self.phase in WORKING and self._clock() - self._last_heartbeat > HEARTBEAT_S:
            self._beat()

    def _beat(self) -> None:
        self._last_heartbeat, self.said = self._clock(), self.phase
        beat = Presence(st="on", boot=self._boot, ph=self.phase, beat=True)
        self._send(topics.presence(self._fleet, self._name), messages.encode(beat, packed=self.packed), qos=0)

    def _send(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        send(self._link, topic, payload, self._log, retain=retain, qos=qos)


def _ram_mib() -> int:
    """Memory of the machine in MiB; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (ValueError, OSError):
        return 0
