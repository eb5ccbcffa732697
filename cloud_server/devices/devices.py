"""``metafleet devices``: who belongs to the fleet, who may join it, and who has to leave. What a command
needs is imported when it is called."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.records.ledger import Ledger, asked_at
from cloud_server.records.ledger_tables import Certificate, Device
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.protocol import topics

if TYPE_CHECKING:
    from cloud_server.records.fleet_folder import Fleet

devices_app = typer.Typer(help="The fleet's devices.", no_args_is_help=True)

FLEET = Annotated[Path, typer.Argument(metavar="FLEET", help="The fleet's folder.")]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_VALID_S = 366 * 86400.0
TIMES = ("first_seen", "last_seen", "issued_at", "expires_at")  # Unix seconds


def address_of(url: str | None) -> str | None:
    """A broker's URL as an option's value. Raises ConfigError."""
    if url is not None:
        from cloud_server.running import aggregator_process
        from fleet_core.link.mqtt import parse_url

        if url != aggregator_process.EMBEDDED:
            parse_url(url)
    return url


BROKER_OF = Annotated[
    str | None,
    typer.Option(envvar="METAFLEET_BROKER", callback=address_of,
                 help="mqtt(s)://host:port; else fleet.toml's, else the private one on this machine."),
]
PLAIN = Annotated[
    bool, typer.Option("--plain", envvar="METAFLEET_PLAIN", help="Plain MQTT may leave this machine: anyone in between "
                                                                  "reads and writes it.")
]


def url_of(broker: str | None, fleet: Fleet, plain: bool = False) -> str:
    """Where the broker is: flag or environment, else the file, else the private one that runs, as it was started last.
    Raises ConfigError for plain MQTT that leaves this machine, unless that is asked for."""
    from cloud_server.running import aggregator_process
    from fleet_core.link.mqtt import check_plain

    named = broker or fleet.config.link.broker
    if named is not None and named != aggregator_process.EMBEDDED:
        return check_plain(named, plain or fleet.config.link.plain)
    return aggregator_process.private_url(fleet)


# What is there --------------------------------------------------------------------------------------------------------


@devices_app.command("list")
def devices_list(fleet: FLEET, as_json: JSON = False) -> None:
    """Every device that was ever seen, and those that a token waits for; "pending" is what the aggregator has still to
    carry out."""
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        listed = [_facts(ledger, row) for row in _rows(ledger)]
    if as_json:
        return terminal.show(listed)
    rows = [(d["name"], _status(d), d["state"], d["phase"], d["version"], "yes" if d["took_part"] else "no",
             terminal.date((d["certificate"] or {}).get("expires_at")), d["cannot"] or "") for d in listed]
    terminal.table(rows, ("device", "status", "state", "phase", "version", "took part", "certificate until", "cannot"))
    if not rows:
        processes.say(f"no device yet: metafleet devices enroll {typed(fleet)} NAME")
    elif not made.running():
        processes.say("the aggregator is not running: state and phase are what it saw last")


@devices_app.command("show")
def devices_show(fleet: FLEET, name: str, as_json: JSON = False) -> None:
    """One device: state, capabilities, certificate, costs."""
    from cloud_server.records.fleet_folder import Fleet

    with Ledger(Fleet.load(fleet).ledger_path, create=False) as ledger:
        facts = {**_facts(ledger, _known(ledger, fleet, name)),
                 "volume": schema.plain(ledger.volume("device").get(name)),
                 "energy": schema.plain(ledger.joules("device").get(name))}
    if as_json:
        return terminal.show(facts)
    terminal.table([(key, _shown(key, value)) for key, value in facts.items()], ("what", "value"))


def _shown(key: str, value: Any) -> str:
    """A fact of a device as people read it: times as dates."""
    if isinstance(value, dict) and key in ("certificate", "token"):
        return ", ".join(f"{inner} {_shown(inner, held)}" for inner, held in value.items())
    if value is None or key in TIMES:
        return terminal.date(value)
    return value if isinstance(value, str) else json.dumps(value)


def _rows(ledger: Ledger) -> list[Device]:
    """The devices of the ledger, and those that a token waits for."""
    from cloud_server.identity import token_enrolment

    known = {device.name: device for device in ledger.devices()}
    for invited in token_enrolment.waiting(ledger).values():
        known.setdefault(invited.device, Device(name=invited.device, status="invited"))
    for name in _pending(ledger):
        known.setdefault(name, Device(name=name, status=""))
    return sorted(known.values(), key=lambda device: device.name)


def _facts(ledger: Ledger, device: Device) -> dict[str, Any]:
    """A device with its certificate and the token that waits for it; neither with what is secret of it."""
    from cloud_server.identity import fleet_certificates, token_enrolment

    held = fleet_certificates.certificate_facts(ledger).get(device.name)
    waiting = token_enrolment.waiting(ledger).get(device.name)
    shown = ("serial", "issued_at", "expires_at")
    return {
        **schema.plain(device),
        "certificate": None if held is None else {key: getattr(held, key) for key in shown},
        "pending": _pending(ledger).get(device.name),
        "token": None if waiting is None else {"id": waiting.id, "expires_at": waiting.expires_at},
    }


def _pending(ledger: Ledger) -> dict[str, str]:
    """Device -> ``enroll`` or ``revoke``: what was asked last and the aggregator has not carried out yet."""
    asked = [(asked_at(value), *key.partition("/")[::2]) for key, value in ledger.asked().items()]
    return {name: what for _, what, name in sorted(asked) if what in ("enroll", "revoke")}


def _status(facts: dict[str, Any]) -> str:
    """As it is, and as it is to be."""
    waits = f"{facts['pending']} pending" if facts["pending"] else ""
    return ", ".join(filter(None, (facts["status"], waits)))


def _known(ledger: Ledger, fleet: Path, name: str) -> Device:
    """Raises ConfigError with the name that may have been meant."""
    rows = {device.name: device for device in _rows(ledger)}
    if name not in rows:
        near = schema.suggest(name, list(rows))
        raise ConfigError(f"no device '{name}'" + (f" (did you mean '{near}'?)" if near else ""),
                          hint=f"metafleet devices list {typed(fleet)}")
    return rows[name]


def askable(fleet: Fleet, name: str) -> Device:
    """The device, if it can be asked for answers. Raises ConfigError when it never joined or was revoked."""
    with Ledger(fleet.ledger_path, create=False) as ledger:
        device = _known(ledger, fleet.folder, name)
    if device.status != "enrolled":
        why = "was revoked" if device.status == "revoked" else "has not joined yet"
        raise ConfigError(f"device '{name}' {why}", hint=f"metafleet devices list {typed(fleet.folder)}")
    return device


# Who comes and goes ---------------------------------------------------------------------------------------------------


@devices_app.command("enroll")
def devices_enroll(
    fleet: FLEET,
    name: str,
    to: Annotated[Path | None, typer.Option("--to", help="Folder that an agent will run in; with an mqtts:// broker "
                                                         "the token is put there.")] = None,
    token_path: Annotated[Path | None, typer.Option("--token", metavar="FILE", help="Default: NAME.token.")] = None,
    valid: Annotated[str, typer.Option(help="How long the token may wait: 30m, 24h, 7d.")] = "24h",
    broker: BROKER_OF = None,
    plain: PLAIN = False,
    as_json: JSON = False,
) -> None:
    """Let a device in: a one-time token in a file, or a folder to run an agent in on this machine."""
    from cloud_server.identity import device_folder, token_enrolment
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.link.mqtt import parse_url
    from fleet_core.protocol import enrolment_token

    made = Fleet.load(fleet)
    topics.check_name(name, "device")
    url = token_broker(broker, made) if to is None else url_of(broker, made, plain)
    if to is not None and not parse_url(url).tls:
        return _enroll_plainly(made, name, to, url, as_json)
    device_folder.check_folder(made, name, to)
    path = token_path or (Path(f"{name}.token") if to is None else to / enrolment_token.FILE)
    issued = token_enrolment.invite(made, name, path, url, _seconds(valid))
    if as_json:
        facts = {"device": name, "file": str(path), "token": issued.id, "expires_at": issued.expires, "broker": url}
        return terminal.show(facts)
    print(f"{path} written: good once, until {terminal.date(issued.expires)}")
    command = f"edge-agent run --home {typed(to)}" if to is not None else f"edge-agent enroll {path.name} --home HOME"
    processes.say(f"next, on the device: {command}; the aggregator has to be running")


def _enroll_plainly(fleet: Fleet, name: str, to: Path, url: str, as_json: bool) -> None:
    """A folder for the private broker on this machine, where nobody needs a certificate."""
    from cloud_server.identity import device_folder

    path = device_folder.device_folder(fleet, name, to, url)
    _ask(fleet.folder, f"enroll/{name}", repr(time.time()))
    if as_json:
        return terminal.show({"device": name, "file": str(path), "broker": url})
    print(f"{path} written; put the device's samples beside it as samples.npz, or name a file or a folder in it "
          f'([data] samples = "readings.csv"); then: edge-agent run --home {typed(to)}')


def token_broker(broker: str | None, fleet: Fleet) -> str:
    """The broker that a token names: the one that is named, or the private one beyond loopback."""
    from cloud_server.identity import fleet_certificates
    from cloud_server.running import aggregator_process

    named = broker or fleet.config.link.broker
    if named is not None and named != aggregator_process.EMBEDDED:
        return named
    place = fleet_certificates.placed(fleet.folder)
    if place is None:
        raise ConfigError("the fleet has no certificates yet", where=str(fleet.folder),
                          hint=f"metafleet init {typed(fleet.folder)}")
    return place.url


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    seconds = 0.0 if found is None else int(found[1]) * UNITS_S[found[2]]
    if not 0 < seconds <= MAX_VALID_S:
        raise ConfigError("is no time", where=f"--valid {text[:20]}", expected="30m, 24h or 7d, a year at most")
    return seconds


@devices_app.command("revoke")
def devices_revoke(fleet: FLEET, name: str, as_json: JSON = False) -> None:
    """Take a device out, with its certificate and its tokens; methods with duals start them again from zero."""
    from cloud_server.identity import fleet_certificates
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        _known(ledger, fleet, name)
        ledger.ask(f"revoke/{name}", repr(time.time()))
        held = [row.serial for row in ledger.rows(Certificate, device=name) if row.revoked_at is None]
        running = made.running()
        if not running and (made.folder / "ca.key").exists():
            fleet_certificates.write_revocations(made, ledger, also=(name,))
    if as_json:
        return terminal.show({"device": name, "certificates": held, "aggregator": "on" if running else "off"})
    print(f"{name} leaves now" if running else f"{name} leaves when the aggregator runs")


def _ask(fleet: Path, key: str, value: str) -> None:
    from cloud_server.records.fleet_folder import Fleet

    with Ledger(Fleet.load(fleet).ledger_path, create=False) as ledger:
        ledger.ask(key, value)
