"""``metafleet server status`` and ``metafleet watch``: a fleet's state as plain values, as lines, and live."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from cloud_server.devices import pause, roll_back, updates
from cloud_server.identity import announce_keys, token_authority, token_enrolment
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Round
from cloud_server.membership import quarantine
from cloud_server.records import key_files, signing_keys, update_record
from cloud_server.records.fleet_folder import Fleet
from cloud_server.reports.terminal_view import LiveView, energy_lines, snapshot
from cloud_server.results import result
from cloud_server.results.result import Sums
from cloud_server.rounds import privacy_budget
from cloud_server.rounds.budget import ENDED, resting
from fleet_core.base import terminal
from fleet_core.base.errors import shortened
from fleet_core.base.processes import typed
from fleet_core.protocol.signing import key_id

LOOK_S = 1.0


def facts(fleet: Fleet, ledger: Ledger, sums: Sums | None = None) -> dict[str, Any]:
    """The state of a fleet as plain JSON. sums: the result of ``result.sums``, if it is known."""
    enrolled = {d.name: d for d in ledger.devices() if d.status == "enrolled"}
    invited = token_enrolment.open_tokens(ledger).keys() - enrolled
    programs = Counter(d.version for d in enrolled.values() if d.version)
    stalled, ended = ledger.fact("stalled"), ledger.fact(ENDED)
    used_up, shut_out = resting(ledger, time.time()), quarantine.quarantined(ledger)
    known, went_back = enrolled.keys() - shut_out, roll_back.last(ledger)
    update = update_record.read(fleet.folder)
    private = privacy_budget.facts(fleet.config.privacy, ledger)
    named = {name: why for name, why in quarantine.suspects(ledger).items() if name in known}
    moved = sorted(name for name, device in enrolled.items() if device.capabilities.get("moved"))
    return {
        "fleet": fleet.config.fleet.name, "method": fleet.method.name, "running": fleet.running(),
        "paused": pause.is_paused(ledger), "finished": pause.last_closed(ledger) >= fleet.config.fleet.rounds,
        "rounds_closed": ledger.closed_count(), "rounds": fleet.config.fleet.rounds,
        "open_round": ledger.newest(Round, status="open"),
        "enrolled": len(enrolled), "on": [d.name for d in enrolled.values() if d.state == "on"],
        "off": [d.name for d in enrolled.values() if d.state == "off" and d.took_part],
        "not_on_yet": sorted([*invited, *(name for name, d in enrolled.items() if not d.capabilities)]),
        "programs": dict(sorted(programs.items())), "totals": result.plain(sums or result.sums(ledger)),
        "keys": key_files.state(fleet.folder), **_succession(fleet, enrolled),
        **({"old_authority": announce_keys.needed(fleet, ledger)} if (fleet.folder / "ca-next.pem").exists() else {}),
        **_tokens(fleet, ledger), **({"stalled": stalled} if stalled else {}), **({"ended": ended} if ended else {}),
        **({"resting": used_up} if used_up else {}), **({"suspects": named} if named else {}),
        **({"quarantined": shut_out} if shut_out else {}), **({"rolled_back": went_back} if went_back else {}),
        **({"moved": moved} if moved else {}),
        **({"privacy": private} if private else {}), **({"update": updates.facts(update)} if update else {}),
    }


def _succession(fleet: Fleet, enrolled: dict[str, Device]) -> dict[str, Any]:
    """The last roll-over of the fleet's key, if there was one."""
    last = signing_keys.last(fleet.folder)
    if last is None:
        return {}
    have, behind = announce_keys.followed(list(enrolled.values()), last.new)
    return {"key": {
        "id": key_id(last.new), "number": last.number, "signs": signing_keys.pending(fleet.folder) is None,
        "until": last.until, "cut": last.cut, "followed": len(have), "behind": behind,
    }}


def _tokens(fleet: Fleet, ledger: Ledger) -> dict[str, Any]:
    """Who has an unused token of an earlier authority of the enrolment port; empty if nobody has."""
    left = token_authority.behind(fleet.folder, ledger) if (fleet.folder / "tokens-ca.pem").exists() else []
    return {"old_tokens": left} if left else {}


def lines(facts: dict[str, Any], fleet: Path) -> Iterator[str]:
    """The state from ``facts`` in words. fleet: its folder, for the commands that are suggested."""
    on = f"{len(facts['on'])} of {facts['enrolled']} enrolled devices on"
    yield (f"fleet {facts['fleet']}, {facts['method']}: {facts['rounds_closed']} of {facts['rounds']} rounds closed, "
           + (on if facts["running"] else "the aggregator is not running"))
    if facts["finished"]:
        yield pause.done(facts["rounds"])
    elif "ended" in facts:
        yield facts["ended"]
    elif facts["paused"]:
        yield f"paused: no further round opens until 'metafleet server resume {typed(fleet)}'"
    if facts["not_on_yet"]:
        yield f"enrolled or invited, and not on yet: {', '.join(shortened(facts['not_on_yet']))}"
    if "stalled" in facts:
        yield f"stalled: {facts['stalled']}"
    if "rolled_back" in facts:
        back = facts["rolled_back"]
        yield f"after round {back['from']} training went back to the model of round {back['to']}: {back['why']}"
    for name, why in facts.get("resting", {}).items():
        yield f"{name} is not asked until 00:00 UTC, its share of the day is used up: {why}"
    for name, why in facts.get("suspects", {}).items():
        yield f"{name}: {why}; to ask it no more: metafleet devices quarantine {typed(fleet)} {name}"
    for name, why in facts.get("quarantined", {}).items():
        yield f"{name} is quarantined: {why}; to ask it again: metafleet devices release {typed(fleet)} {name}"
    if "moved" in facts:
        yield (f"drift on {', '.join(shortened(facts['moved']))}: their samples have moved away from those that they "
               "were personalized on; label some samples there: edge-agent samples add")
    if facts["off"]:
        yield (f"off since they took part: {', '.join(shortened(facts['off']))}; one that never comes back biases the "
               f"model: metafleet devices revoke {typed(fleet)} NAME")
    if facts["programs"]:
        versions = (f"{version} on {count}" for version, count in facts["programs"].items())
        yield f"agents, by what each device said last: {', '.join(versions)}"
    if "update" in facts:
        yield from updates.lines(facts["update"], fleet)
    if "key" in facts and (facts["key"]["behind"] or not facts["key"]["signs"]):
        key = facts["key"]
        yield (f"the fleet's key {key['id']} {'signs' if key['signs'] else 'is announced'}: {key['followed']} devices "
               f"have switched, {len(key['behind'])} have not ({', '.join(shortened(key['behind']))}); the old key "
               f"{'is cut' if key['cut'] else 'is valid until ' + terminal.date(key['until'])}")
    if "old_authority" in facts:
        names = facts["old_authority"]
        yield (f"the fleet has a new authority: {len(names)} devices still need the old one"
               + (f": {', '.join(shortened(names))}" if names else ""))
    if "old_tokens" in facts:
        names = facts["old_tokens"]
        yield (f"the enrolment port has a new authority: {len(names)} devices have an unused token of the old one: "
               f"{', '.join(shortened(names))}")
    if facts["keys"] != "plain":
        yield "the fleet's keys are " + ("encrypted" if facts["keys"] == "encrypted" else
                                         f"encrypted in part: metafleet server encrypt-keys {typed(fleet)}")
    if "privacy" in facts:
        yield privacy_budget.sentence(facts["privacy"])
    payload = facts["totals"].get("payload_bytes")
    if payload:
        yield f"payload up {payload['up']} bytes, down {payload['down']} bytes"
    yield from energy_lines(result.sums_of(facts["totals"]), facts["enrolled"])


def watch(fleet: Fleet, stream: TextIO, *, stopped: Callable[[], bool] = lambda: False, look_s: float = LOOK_S) -> None:
    """Shows the fleet on ``stream`` until it has ended and no aggregator runs, or ``stopped``. look_s: seconds between
    two reads of the ledger."""
    with (
        Ledger(fleet.ledger_path, create=False) as ledger,
        LiveView(fleet.config.fleet.rounds, stream, after_round=pause.last_closed(ledger)) as view,
    ):
        if not fleet.running():
            view.say("the aggregator is not running")
        while not stopped():
            view.update(snapshot(ledger, view.told))
            ended = pause.last_closed(ledger) >= fleet.config.fleet.rounds or ledger.fact(ENDED)
            if ended and not fleet.running():
                return
            time.sleep(look_s)
