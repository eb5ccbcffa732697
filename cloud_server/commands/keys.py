"""``metafleet server encrypt-keys``, ``roll-key``, ``roll-authority``: the passphrase of the fleet's keys, and how keys
are replaced."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cloud_server.devices.devices import FLEET, JSON, seconds_of
from fleet_core.base import processes, terminal
from fleet_core.base.errors import ConfigError

if TYPE_CHECKING:
    from cloud_server.records.fleet_folder import Fleet


def add_to(server_app: typer.Typer) -> None:
    server_app.command("encrypt-keys")(encrypt_keys)
    server_app.command("roll-key")(roll_key)
    server_app.command("roll-authority")(roll_authority)


def encrypt_keys(
    fleet: FLEET,
    change: Annotated[bool, typer.Option("--change", help="Change the passphrase.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Store the keys unencrypted again.")] = False,
) -> None:
    """Encrypt the fleet's keys with a passphrase. Every command that signs then asks for it."""
    from cloud_server.identity import audit_log
    from cloud_server.records import key_files
    from cloud_server.records.fleet_folder import Fleet

    if change and remove:
        raise ConfigError("--change and --remove at once", expected="one of them")
    made = Fleet.load(fleet)
    with made.lock():  # no aggregator may run: it has read the keys already
        if change:
            key_files.change(fleet)
        elif remove:
            key_files.decrypt(fleet)
        else:
            key_files.encrypt(fleet)
    said = "another passphrase" if change else "keys plain" if remove else "keys encrypted"
    audit_log.done(fleet, "encrypt keys", text=said)
    print(said)
    if not remove:
        processes.say("without the passphrase the fleet is lost; copies made before have their former passphrase, or "
                      "none")


def roll_key(
    fleet: FLEET,
    overlap: Annotated[str, typer.Option(help="How long devices accept both keys: 24h, 30d.")] = "30d",
    cut: Annotated[bool, typer.Option("--cut", help="Reject the old key soon, because somebody else has it. Devices "
                                                    "that are off now will need a new token.")] = False,
    as_json: JSON = False,
) -> None:
    """Replace the fleet's signing key. Devices switch to the new key by themselves."""
    from cloud_server.identity import audit_log
    from cloud_server.records import signing_keys
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.protocol.signing import key_id

    made = Fleet.load(fleet)
    known_s = seconds_of(overlap, "--overlap")
    new = signing_keys.roll(fleet, made.config.fleet.name, time.time(), overlap_s=known_s, cut=cut)
    audit_log.done(fleet, "roll key", text=f"{key_id(new.old)} to {key_id(new.new)}{', cut' if cut else ''}")
    running = made.running()
    if as_json:
        return terminal.show({"number": new.number, "old": key_id(new.old), "new": key_id(new.new), "until": new.until,
                              "cut": cut, "aggregator": "on" if running else "off"})
    when = "now" if running else "when the aggregator runs"
    print(f"key {key_id(new.new)} replaces {key_id(new.old)}: devices are told {when}")
    until = terminal.date(new.until)
    processes.say(f"devices that are on have until {until} to switch; all others, and unused tokens, are "
                  "cut off" if cut else
                  f"devices accept both keys until {until}; metafleet server status shows which have switched")
    processes.say("make a new backup: devices that have switched do not accept an earlier one")


def roll_authority(
    fleet: FLEET,
    finish: Annotated[bool, typer.Option("--finish", help="Drop the old authority now; devices and tokens that still "
                                                          "need it are cut off.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="The authority of the enrolment port instead. Tokens made "
                                                          "before stay valid until their date.")] = False,
    as_json: JSON = False,
) -> None:
    """Replace the fleet's certificate authority. When all devices have renewed their certificates, the old one is
    dropped."""
    _roll_tokens(fleet, finish, as_json) if tokens else _roll_authority(fleet, finish, as_json)


def _roll_authority(fleet: Path, finish: bool, as_json: bool) -> None:
    from cloud_server.identity import announce_keys, audit_log, authorities
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.protocol import certificates

    made = Fleet.load(fleet)
    if finish:
        with Ledger(made.ledger_path, create=False) as ledger:
            left = announce_keys.needed(made, ledger)
        authorities.finish(fleet)
        audit_log.done(fleet, "drop authority", text=f"cut off: {', '.join(left)}" if left else "")
    else:
        new = authorities.begin(fleet, made.config.fleet.name)
        with Ledger(made.ledger_path, create=False) as ledger:
            left = announce_keys.needed(made, ledger)
        audit_log.done(fleet, "roll authority", text=certificates.authority_id(new.certificate))
    running = _told_the_broker(made)
    if as_json:
        return terminal.show({"finished": finish, "need_old": left, "aggregator": "on" if running else "off"})
    when = "now" if running else "when the aggregator runs"
    if finish:
        print(f"the old authority is dropped {when}")
        return processes.say(f"these need a new token: {', '.join(left)}" if left else "no device needed it")
    print(f"devices get certificates of the new authority {when}: {len(left)} still need the old one")
    processes.say("the old authority is dropped when no device needs it; metafleet server status shows which still do. "
                  "Then make a backup")


def _roll_tokens(fleet: Path, finish: bool, as_json: bool) -> None:
    from cloud_server.identity import audit_log, token_authority
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.protocol import certificates

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        if finish:
            left = token_authority.behind(fleet, ledger)
            token_authority.finish(fleet)
            audit_log.done(fleet, "drop tokens", text=f"cut off: {', '.join(left)}" if left else "")
        else:
            new = token_authority.roll(fleet, made.config.fleet.name, ledger)
            left = token_authority.behind(fleet, ledger)
            audit_log.done(fleet, "roll tokens", text=certificates.authority_id(new.certificate))
    running = _told_the_broker(made)
    if as_json:
        return terminal.show({"finished": finish, "need_old": left, "aggregator": "on" if running else "off"})
    when = "now" if running else "when the aggregator runs"
    if finish:
        print(f"the enrolment port drops its old authority {when}")
        return processes.say(f"these need a new token: {', '.join(left)}" if left else "no token needed it")
    print(f"the enrolment port has a new authority, which signs tokens from now on: {len(left)} devices have an unused "
          "token of the old one")
    processes.say("the port trusts the old one until these are used or have expired; --finish drops it now. "
                  "Then make a backup")


def _told_the_broker(made: Fleet) -> bool:
    """Whether an aggregator runs, which tells the broker what to trust; else writes the broker's folder."""
    from cloud_server.identity import fleet_certificates
    from cloud_server.ledger.ledger import Ledger

    running, setup = made.running(), fleet_certificates.saved_setup(made.folder)
    if not running and setup is not None:
        with Ledger(made.ledger_path, create=False) as ledger:
            fleet_certificates.configure(made, ledger, setup)
    return running
