"""``metafleet devices``: lists, shows, enrols, quarantines and revokes a fleet's devices.

Heavy modules are imported inside the commands. Other commands take the shared options from here.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.protocol import topics

if TYPE_CHECKING:
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.ledger.ledger_tables import Device
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.link.broker_password import BrokerLogin

devices_app = typer.Typer(help="The fleet's devices.", no_args_is_help=True)

FLEET = Annotated[Path, typer.Argument(metavar="FLEET", help="The fleet's folder.")]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_VALID_S = 366 * 86400.0
REQUESTS = ("enroll", "revoke", "quarantine", "release")
TIMES = ("first_seen", "last_seen", "issued_at", "expires_at")  # Unix seconds


def checked_url(url: str | None) -> str | None:
    """Callback of an option that takes a broker's URL. Raises ConfigError for a malformed one."""
    if url is not None:
        from cloud_server.running import aggregator_process
        from fleet_core.link.mqtt import parse_url

        if url != aggregator_process.EMBEDDED:
            parse_url(url)
    return url


BROKER_OPTION = Annotated[
    str | None,
    typer.Option(envvar="METAFLEET_BROKER", callback=checked_url,
                 help="mqtt(s)://host:port or ws(s)://host:port/path; default: the one in fleet.toml, or the private "
                      "broker on this machine."),
]
PLAIN = Annotated[
    bool, typer.Option("--plain", envvar="METAFLEET_PLAIN", help="Allow plain MQTT beyond this machine: anyone on the "
                                                                  "network path can read and change it.")
]


def broker_url(broker: str | None, fleet: Fleet, plain: bool = False) -> str:
    """The broker's URL: from the option or the environment, else from fleet.toml, else of the private broker as it was
    last started. Raises ConfigError for plain MQTT beyond this machine unless ``plain`` or fleet.toml allows it."""
    from cloud_server.running import aggregator_process
    from fleet_core.link.mqtt import check_plain

    named = broker or fleet.config.link.broker
    if named is not None and named != aggregator_process.EMBEDDED:
        return check_plain(named, plain or fleet.config.link.plain)
    return aggregator_process.private_url(fleet)


def _ledger(fleet: Fleet) -> Ledger:
    from cloud_server.ledger.ledger import Ledger

    return Ledger(fleet.ledger_path, create=False)


# List and show --------------------------------------------------------------------------------------------------------


@devices_app.command("list")
def devices_list(fleet: FLEET, as_json: JSON = False) -> None:
    """List every device that was ever seen or has an unused token. "pending": requests that the aggregator has not
    carried out yet."""
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    with _ledger(made) as ledger:
        listed = facts_of(ledger, listed_devices(ledger))
    if as_json:
        return terminal.show(listed)
    rows = [(d["name"], _status(d), d["state"], d["phase"], d["version"], "yes" if d["took_part"] else "no",
             terminal.date((d["certificate"] or {}).get("expires_at")), d["cannot"] or _moved(d)) for d in listed]
    terminal.table(rows, ("device", "status", "state", "phase", "version", "took part", "certificate until", "note"))
    if not rows:
        processes.say(f"no device yet: metafleet devices enroll {typed(fleet)} NAME")
    elif not made.running():
        processes.say("the aggregator is not running: state and phase are what it saw last")


def _moved(facts: dict[str, Any]) -> str:
    return "drift" if (facts["capabilities"] or {}).get("moved") else ""


@devices_app.command("show")
def devices_show(fleet: FLEET, name: str, as_json: JSON = False) -> None:
    """Show one device: state, capabilities, certificate, costs."""
    from cloud_server.records.fleet_folder import Fleet

    with _ledger(Fleet.load(fleet)) as ledger:
        facts = {**facts_of(ledger, [known_device(ledger, fleet, name)])[0],
                 "volume": schema.plain(ledger.volume("device").get(name)),
                 "energy": schema.plain(ledger.joules("device").get(name)),
                 "absent_energy": list(ledger.absent_energy("device").get(name, ()))}
    if as_json:
        return terminal.show(facts)
    terminal.table([(key, _fact_text(key, value)) for key, value in facts.items()], ("what", "value"))


def _fact_text(key: str, value: Any) -> str:
    if isinstance(value, dict) and key in ("certificate", "token"):
        return ", ".join(f"{inner} {_fact_text(inner, held)}" for inner, held in value.items())
    if value is None or key in TIMES:
        return terminal.date(value)
    return value if isinstance(value, str) else json.dumps(value)


def listed_devices(ledger: Ledger) -> list[Device]:
    """The devices of the ledger, those with an unused token, and those with a pending request; by name."""
    from cloud_server.identity import token_enrolment
    from cloud_server.ledger.ledger_tables import Device

    known = {device.name: device for device in ledger.devices()}
    for invited in token_enrolment.open_tokens(ledger).values():
        known.setdefault(invited.device, Device(name=invited.device, status="invited"))
    for name in pending_requests(ledger):
        known.setdefault(name, Device(name=name, status=""))
    return sorted(known.values(), key=lambda device: device.name)


def facts_of(ledger: Ledger, devices: Iterable[Device]) -> list[dict[str, Any]]:
    """Devices with their certificates, pending requests, unused tokens, and why they are not asked today or
    quarantined, as plain values without secrets."""
    from cloud_server.identity import fleet_certificates, token_enrolment
    from cloud_server.membership import quarantine
    from cloud_server.rounds.budget import resting

    certificates, tokens = fleet_certificates.certificate_facts(ledger), token_enrolment.open_tokens(ledger)
    pending, rests = pending_requests(ledger), resting(ledger, time.time())
    quarantined, public_keys = quarantine.quarantined(ledger), ("serial", "issued_at", "expires_at")

    def facts(device: Device) -> dict[str, Any]:
        certificate, token = certificates.get(device.name), tokens.get(device.name)
        return {
            **schema.plain(device),
            "engine": engine_of(device),
            "certificate": None if certificate is None else {key: getattr(certificate, key) for key in public_keys},
            "pending": pending.get(device.name),
            "token": None if token is None else {"id": token.id, "expires_at": token.expires_at},
            "resting": rests.get(device.name),
            "quarantined": quarantined.get(device.name),
        }

    return [facts(device) for device in devices]


def engine_of(device: Device) -> str:
    """The engine that the device trains with, as its agent reported; empty if it has never connected or does not
    train."""
    engines = device.capabilities.get("engines") or (["torch"] if device.capabilities.get("train") else [])
    return str(engines[0]) if device.capabilities.get("train") else ""


def pending_requests(ledger: Ledger) -> dict[str, str]:
    """Device -> one of ``REQUESTS``: its newest request that the aggregator has not carried out yet."""
    from cloud_server.ledger.ledger import requested_at

    requests = [(requested_at(value), *key.partition("/")[::2]) for key, value in ledger.requests().items()]
    return {name: what for _, what, name in sorted(requests) if what in REQUESTS}


def _status(facts: dict[str, Any]) -> str:
    pending = f"{facts['pending']} pending" if facts["pending"] else ""
    resting = "not asked today" if facts["resting"] else ""
    quarantined = "quarantined" if facts["quarantined"] else ""
    return ", ".join(filter(None, (facts["status"], quarantined, pending, resting)))


def known_device(ledger: Ledger, fleet: Path, name: str) -> Device:
    """The device of this name. Raises ConfigError with a suggestion if there is none."""
    rows = {device.name: device for device in listed_devices(ledger)}
    if name not in rows:
        near = schema.suggest(name, list(rows))
        raise ConfigError(f"no device '{name}'" + (f" (did you mean '{near}'?)" if near else ""),
                          hint=f"metafleet devices list {typed(fleet)}")
    return rows[name]


def enrolled_device(fleet: Fleet, name: str) -> Device:
    """The enrolled device of this name. Raises ConfigError if it never joined or was revoked."""
    with _ledger(fleet) as ledger:
        device = known_device(ledger, fleet.folder, name)
    if device.status != "enrolled":
        why = "was revoked" if device.status == "revoked" else "has not joined yet"
        raise ConfigError(f"device '{name}' {why}", hint=f"metafleet devices list {typed(fleet.folder)}")
    return device


# Enrol and revoke -----------------------------------------------------------------------------------------------------


@devices_app.command("enroll")
def devices_enroll(
    fleet: FLEET,
    name: str,
    to: Annotated[Path | None, typer.Option("--to", help="Folder for an agent on this machine; with an mqtts:// "
                                                         "broker the token is written there.")] = None,
    token_path: Annotated[Path | None, typer.Option("--token", metavar="FILE", help="The token's file; default: "
                                                    "NAME.token.")] = None,
    valid: Annotated[str, typer.Option(help="How long the token is valid: 30m, 24h, 7d.")] = "24h",
    broker: BROKER_OPTION = None,
    plain: PLAIN = False,
    user: Annotated[str | None, typer.Option("--broker-user", metavar="NAME", help="With --to: the device logs in at "
                                             "the broker under this name, and needs no token.")] = None,
    password: Annotated[Path | None, typer.Option("--broker-password", metavar="FILE", help="File with that name's "
                                                  "password, which nobody else can read.")] = None,
    as_json: JSON = False,
) -> None:
    """Enrol a device: write a one-time token, or a folder for an agent on this machine."""
    from cloud_server.identity import audit_log, device_folder, token_enrolment
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.link.broker_password import BrokerLogin
    from fleet_core.link.mqtt import parse_url
    from fleet_core.protocol import enrolment_token

    made = Fleet.load(fleet)
    topics.check_name(name, "device")
    url = broker_for_token(broker, made) if to is None else broker_url(broker, made, plain)
    login = BrokerLogin(user, None if password is None else str(password.absolute()))
    if login != BrokerLogin() and to is None:
        raise ConfigError("needs the device's folder", where="--broker-user", hint="add --to FOLDER")
    if to is not None and (login != BrokerLogin() or not parse_url(url).tls):
        return _enrol_without_token(made, name, to, url, login, as_json)
    device_folder.check_folder(made, name, to)
    path = token_path or (Path(f"{name}.token") if to is None else to / enrolment_token.FILE)
    issued = token_enrolment.issue_token(made, name, path, url, seconds_of(valid))
    audit_log.done(fleet, "token", name, f"{issued.id}, until {terminal.date(issued.expires)}")
    if as_json:
        facts = {"device": name, "file": str(path), "token": issued.id, "expires_at": issued.expires, "broker": url}
        return terminal.show(facts)
    print(f"{path} written: valid once, until {terminal.date(issued.expires)}")
    command = f"edge-agent run --home {typed(to)}" if to is not None else f"edge-agent enroll {path.name} --home HOME"
    processes.say(f"next, on the device: {command}, while the aggregator runs")


def _enrol_without_token(
    fleet: Fleet, name: str, to: Path, url: str, login: BrokerLogin, as_json: bool
) -> None:
    """Writes a device's folder for a broker that asks for no certificate: a broker without TLS, or with a login."""
    from cloud_server.identity import audit_log, device_folder
    from fleet_core.base import storage

    tables, files = device_folder.login_parts(fleet, url, login, Path())
    device_folder.check_folder(fleet, name, to)
    for file, data in files.items():
        storage.write_atomic(to / file, data, mode=0o600)
    path = device_folder.write_device_folder(fleet, name, to, url, **tables)
    with _ledger(fleet) as ledger:
        ledger.request_enrolment(name)
    audit_log.done(fleet.folder, "enrol", name)
    if as_json:
        return terminal.show({"device": name, "file": str(path), "broker": url})
    print(f"{path} written; put the device's samples beside it as samples.npz, or name a file or a folder in it "
          f'([data] samples = "readings.csv"); then: edge-agent run --home {typed(to)}')


def broker_for_token(broker: str | None, fleet: Fleet) -> str:
    """The broker's URL for a token: from the option or fleet.toml, else of the private broker with TLS."""
    from cloud_server.identity import fleet_certificates
    from cloud_server.running import aggregator_process

    named = broker or fleet.config.link.broker
    if named is not None and named != aggregator_process.EMBEDDED:
        return named
    setup = fleet_certificates.saved_setup(fleet.folder)
    if setup is None:
        raise ConfigError("the fleet has no certificates yet", where=str(fleet.folder),
                          hint=f"metafleet init {typed(fleet.folder)}")
    return setup.url


def seconds_of(text: str, option: str = "--valid") -> float:
    """Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,6})([mhd])", text)
    seconds = 0.0 if found is None else int(found[1]) * UNITS_S[found[2]]
    if not 0 < seconds <= MAX_VALID_S:
        raise ConfigError("is not a duration", where=f"{option} {text[:20]}", expected="30m, 24h or 7d, a year at most")
    return seconds


@devices_app.command("revoke")
def devices_revoke(fleet: FLEET, name: str, as_json: JSON = False) -> None:
    """Revoke a device with its certificates and tokens; methods with duals restart them from zero."""
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet

    serials, running = revoke(Fleet.load(fleet), name)
    audit_log.done(fleet, "revoke", name)
    if as_json:
        return terminal.show({"device": name, "certificates": serials, "aggregator": "on" if running else "off"})
    print(revoked_text(name, running))


def revoke(fleet: Fleet, name: str) -> tuple[list[str], bool]:
    """Asks the aggregator to revoke a device. Returns the serials of its valid certificates, and whether the aggregator
    runs. Raises ConfigError if there is no such device, StateError."""
    from cloud_server.identity import fleet_certificates
    from cloud_server.ledger import disk_errors
    from cloud_server.ledger.ledger_tables import Certificate

    def asked() -> tuple[list[str], bool]:
        with _ledger(fleet) as ledger:
            known_device(ledger, fleet.folder, name)
            ledger.request(f"revoke/{name}", repr(time.time()))
            serials = [row.serial for row in ledger.rows(Certificate, device=name) if row.revoked_at is None]
            running = fleet.running()
            if not running and (fleet.folder / "ca.key").exists():
                fleet_certificates.write_revocations(fleet, ledger)
        return serials, running

    return disk_errors.with_reserve(fleet.folder, asked)


def revoked_text(name: str, running: bool) -> str:
    """What happens after ``revoke``. running: whether the aggregator runs."""
    return f"{name} is revoked now" if running else f"{name} is revoked when the aggregator runs"


# Quarantine -----------------------------------------------------------------------------------------------------------


@devices_app.command("quarantine")
def devices_quarantine(fleet: FLEET, name: str, as_json: JSON = False) -> None:
    """Ask a device for no updates, until it is released; it stays enrolled. Methods with duals restart them from zero.
    """
    _ask(fleet, name, "quarantine", f"{name} is quarantined", as_json)


@devices_app.command("release")
def devices_release(fleet: FLEET, name: str, as_json: JSON = False) -> None:
    """Release a device from quarantine: rounds ask it again."""
    _ask(fleet, name, "release", f"{name} is released", as_json)


def _ask(folder: Path, name: str, what: str, done: str, as_json: bool) -> None:
    """Leaves a request about an enrolled device. Raises ConfigError if there is none of this name."""
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet

    fleet = Fleet.load(folder)
    enrolled_device(fleet, name)
    with _ledger(fleet) as ledger:
        ledger.request(f"{what}/{name}", repr(time.time()))
    audit_log.done(folder, what, name)
    running = fleet.running()
    if as_json:
        return terminal.show({"device": name, "asked": what, "aggregator": "on" if running else "off"})
    print(f"{done} from now on" if running else f"{done} when the aggregator runs")
