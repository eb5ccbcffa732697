"""``metafleet server``: starts the aggregator, and asks how its fleet is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import FLEET, JSON, PLAIN, checked_url
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import shortened
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.ledger import Ledger

server_app = typer.Typer(help="The aggregator.", no_args_is_help=True)

BROKER = Annotated[
    str | None,
    typer.Option(envvar="METAFLEET_BROKER", callback=checked_url,
                 help="mqtt(s)://host:port; none: a private mosquitto; 'embedded': a private amqtt."),
]


@server_app.command("start")
def start(
    fleet: FLEET,
    broker: BROKER = None,
    host: Annotated[str, typer.Option(help="Address of the private broker; beyond loopback it takes certificates.")]
    = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Of the private broker; default 1883, or 8883 "
                                                                     "beyond loopback.")] = None,
    plain: PLAIN = False,
    connect_s: Annotated[float, typer.Option(help="Leave when no broker answered for so long at the start.")] = 30.0,
    until_done: Annotated[bool, typer.Option("--until-done", help="Leave after the last round.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live view.")] = False,
) -> None:
    """Run the aggregator; a run that was stopped goes on."""
    from cloud_server.records.fleet_folder import Fleet

    Fleet.load(fleet).graph_bytes()  # what is wrong is said here
    options = {"broker": broker, "host": host, "port": port, "plain": plain, "connect_s": connect_s,
               "until_done": until_done, "quiet": quiet}
    processes.exec_module("cloud_server.running.aggregator_process", str(fleet), json.dumps(options))


@server_app.command("config")
def server_config(
    fleet: FLEET,
    host: Annotated[list[str] | None, typer.Option(help="A name or address by which devices reach the broker, the one "
                                                        "that they are told first; may be given again.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default 8883.")] = None,
    enrolment_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Where tokens are taken; default 8884.")]
    = None,
    at: Annotated[str, typer.Option(help="Folder in which the broker will find these files; default: this one.")] = "",
) -> None:
    """Write what a mosquitto needs to be this fleet's broker: configuration, access lists, certificates."""
    from cloud_server.broker.mosquitto_config import ENROLMENT_PORT, PORT, BrokerSetup
    from cloud_server.identity import fleet_certificates
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.ledger import Ledger

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path) as ledger:
        fleet_certificates.create_missing(made, ledger)
        hosts = tuple(host) if host else fleet_certificates.default_hosts(made.config.link.broker)
        place = BrokerSetup(hosts, port or PORT, enrolment_port or ENROLMENT_PORT, at=at)
        path = fleet_certificates.configure(made, ledger, place)
    print(path)
    processes.say(
        f"devices find the broker at {place.url}; all that it needs is in {path.parent}, server.key is secret"
    )


@server_app.command("status")
def status(fleet: FLEET, as_json: JSON = False) -> None:
    """How far the fleet is, who is on, what it has cost."""
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.ledger import Ledger
    from cloud_server.reports import result, verdict

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        facts, found = _status(made, ledger), verdict.of_ledger(ledger)
    if as_json:
        return terminal.show(facts if found is None else {**facts, "verdict": result.plain(found)})
    for line in (*_told(facts, fleet), *verdict.lines(found)):
        print(line)


def _status(fleet: Fleet, ledger: Ledger) -> dict[str, Any]:
    from collections import Counter

    from cloud_server.commands import pause
    from cloud_server.identity import token_enrolment
    from cloud_server.reports import result
    from cloud_server.reports.terminal_view import snapshot

    totals, enrolled = ledger.totals(), {d.name: d for d in ledger.devices() if d.status == "enrolled"}
    invited = token_enrolment.open_tokens(ledger).keys() - enrolled
    programs = Counter(d.version for d in enrolled.values() if d.version)
    stalled = ledger.facts().get("stalled")
    return {
        "fleet": fleet.config.fleet.name, "method": fleet.method.name, "running": fleet.running(),
        "paused": pause.is_paused(ledger), "finished": pause.last_closed(ledger) >= fleet.config.fleet.rounds,
        "rounds_closed": totals.rounds, "rounds": fleet.config.fleet.rounds, "open_round": snapshot(ledger).open_round,
        "enrolled": len(enrolled), "on": [d.name for d in enrolled.values() if d.state == "on"],
        "off": [d.name for d in enrolled.values() if d.state == "off" and d.took_part],
        "not_on_yet": sorted([*invited, *(name for name, d in enrolled.items() if not d.capabilities)]),
        "programs": dict(sorted(programs.items())), "totals": result.plain_sums(ledger),
        **({"stalled": stalled} if stalled else {}),
    }


def _told(facts: dict[str, Any], fleet: Path) -> Iterator[str]:
    """The status in lines."""
    from cloud_server.commands import pause

    on = f"{len(facts['on'])} of {facts['enrolled']} enrolled devices on"
    yield (f"fleet {facts['fleet']}, {facts['method']}: {facts['rounds_closed']} of {facts['rounds']} rounds closed, "
           + (on if facts["running"] else "the aggregator is not running"))
    if facts["finished"]:
        yield pause.done(facts["rounds"])
    elif facts["paused"]:
        yield f"paused: no further round opens until 'metafleet server resume {typed(fleet)}'"
    if facts["not_on_yet"]:
        yield f"enrolled or invited, and not on yet: {', '.join(shortened(facts['not_on_yet']))}"
    if "stalled" in facts:
        yield f"stalled: {facts['stalled']}"
    if facts["off"]:
        yield (f"off since they took part: {', '.join(shortened(facts['off']))}; one that never comes back biases the "
               f"model: metafleet devices revoke {typed(fleet)} NAME")
    if facts["programs"]:
        versions = (f"{version} on {count}" for version, count in facts["programs"].items())
        yield f"agents, by what each device said last: {', '.join(versions)}"
    payload = facts["totals"].get("payload_bytes")
    if payload:
        yield f"payload up {payload['up']} bytes, down {payload['down']} bytes"


@server_app.command("rounds")
def rounds(fleet: FLEET, as_json: JSON = False) -> None:
    """Every round: who was asked, who was counted, how long it took."""
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.ledger import Ledger

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        listed = ledger.rounds()
    if as_json:
        return terminal.show([schema.plain(r) for r in listed])
    rows = [
        (str(r.round), terminal.date(r.opened_at), r.status, str(len(r.cohort)),
         "" if r.loss is None else f"{r.loss:.4f}", "" if r.seconds is None else f"{r.seconds:.1f}", r.note)
        for r in listed
    ]
    terminal.table(rows, ("round", "opened", "status", "cohort", "loss", "seconds", "note"))
    if not rows:
        processes.say("no round has been opened yet")


@server_app.command("backup")
def server_backup(
    fleet: FLEET,
    to: Annotated[Path, typer.Option("--to", help="The folder to make.")],
    as_json: JSON = False,
) -> None:
    """Copy the fleet as it stands, also while the aggregator runs; the copy is a fleet's folder."""
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.running.backup import backup

    made = Fleet.load(fleet)
    closed = backup(made, to)
    if as_json:
        return terminal.show({"folder": str(to), "rounds_closed": closed})
    print(to)
    processes.say(f"{closed} of {made.config.fleet.rounds} rounds closed; the fleet's keys are in it: keep it secret")


@server_app.command("pause")
def pause(fleet: FLEET, as_json: JSON = False) -> None:
    """Open no further round; the one in flight is closed."""
    _pause(fleet, True, as_json)


@server_app.command("resume")
def resume(fleet: FLEET, as_json: JSON = False) -> None:
    """Open rounds again."""
    _pause(fleet, False, as_json)


def _pause(fleet: Path, paused: bool, as_json: bool) -> None:
    from cloud_server.commands import pause as pausing
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    answer = pausing.ask(made, paused)
    terminal.show(schema.plain(answer)) if as_json else print(pausing.sentence(answer, made))
