"""``metafleet server pause`` and ``resume``: leave a request in the ledger, and say what will happen."""

from __future__ import annotations

from dataclasses import dataclass

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.processes import typed


@dataclass(frozen=True)
class Answer:
    """paused: the requested state. changed: it was different before. running: whether an aggregator runs. last_round:
    the last closed round, 0 before the first."""

    paused: bool
    changed: bool
    running: bool
    open_round: int | None
    last_round: int
    rounds: int

    @property
    def finished(self) -> bool:
        return self.last_round >= self.rounds


def is_paused(ledger: Ledger) -> bool:
    """The last requested state, even if the aggregator has not read the request yet."""
    return (ledger.requests().get("paused") or ledger.fact("paused")) == "yes"


def last_closed(ledger: Ledger) -> int:
    """The number of the last closed round, 0 before the first."""
    return ledger.newest(Round, status="closed") or 0


def ask(fleet: Fleet, paused: bool) -> Answer:
    """Requests that the fleet pauses or resumes. Raises StateError without a ledger."""
    with Ledger(fleet.ledger_path, create=False) as ledger:
        changed = is_paused(ledger) is not paused
        if changed:
            ledger.request("paused", "yes" if paused else "no")
        return Answer(paused, changed, fleet.running(), ledger.newest(Round, status="open"), last_closed(ledger),
                      fleet.config.fleet.rounds)


def sentence(answer: Answer, fleet: Fleet) -> str:
    """The answer in words, for the operator."""
    if answer.paused:
        return f"{'paused' if answer.changed else 'already paused'}: {_until_resumed(answer, fleet)}"
    return f"{'resumed' if answer.changed else 'was not paused'}: {_goes_on(answer, fleet)}"


def _until_resumed(answer: Answer, fleet: Fleet) -> str:
    until = f"until 'metafleet server resume {typed(fleet.folder)}'"
    if answer.finished:
        return f"all {answer.rounds} rounds are done; if you raise fleet.rounds, no new round opens {until}"
    if not answer.running:
        return f"the aggregator is not running; after its next start it opens no new round {until}"
    if answer.open_round is not None:
        return f"round {answer.open_round} is still completed; no further round opens after it {until}"
    return f"no further round opens after round {answer.last_round} {until}"


def _goes_on(answer: Answer, fleet: Fleet) -> str:
    if answer.finished:
        return done(answer.rounds)
    if answer.open_round is None:
        text = f"the next round is {answer.last_round + 1} of {answer.rounds}"
    else:
        text = f"round {answer.open_round} of {answer.rounds} is open"
    if answer.running:
        return text
    return f"{text}; the aggregator is not running: metafleet server start {typed(fleet.folder)}"


def done(rounds: int) -> str:
    """How to continue a fleet whose rounds are all closed."""
    return f"all {rounds} rounds are done; to train on, raise rounds in fleet.toml and start the server again"
