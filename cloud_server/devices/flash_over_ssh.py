"""``metafleet flash`` over SSH: one device, or all devices of an inventory, several at a time.

The wheels match the Python version found on the device. The token is made after everything else is ready. The device
counts as back once it has announced itself at the fleet's broker.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cloud_server.devices.back_online import MqttWatch
from cloud_server.devices.prepare_flash import Prepared, invited, package_of, prepare
from cloud_server.identity import audit_log, fleet_certificates
from firmware_profiles.package import program
from firmware_profiles.ssh import inventory, release, remote_install, side_by_side, ssh_connection
from firmware_profiles.ssh.inventory import Entry
from firmware_profiles.ssh.release import Release
from firmware_profiles.ssh.remote import Remote, refuse
from firmware_profiles.ssh.remote_install import OnDevice, Outcome, Plan, Tell
from firmware_profiles.ssh.side_by_side import ONE_WAVE, Result, Show, Waves
from fleet_core.base import schema, terminal
from fleet_core.base.errors import ConfigError, FlashError
from fleet_core.link.mqtt import MqttLink

BUILD_LOCK = threading.Lock()
"""Devices of one kind share one program: the first thread builds it, the others find it in the cache."""


@dataclass(frozen=True)
class Choices:
    """The command line's options. config: an ssh config file instead of the user's. patience_s: seconds to wait for a
    device to come back. fleet: the folder of the fleet whose devices alone are flashed; None for any."""

    config: Path | None = None
    patience_s: int = remote_install.PATIENCE_S
    dry_run: bool = False
    as_json: bool = False
    fleet: Path | None = None


def one(path: Path, to: str, choices: Choices, *, accept: str | None = None) -> None:
    """``DEVICE.toml --to ssh://…``. accept: the fingerprint of a host key to accept. Raises FleetError."""
    ssh_connection.parse(to)
    entry = Entry(str(path), to, accept)
    if choices.dry_run:
        plan = _planned(entry, choices)
        if choices.as_json:
            return terminal.show(_facts(entry, plan))
        _print_plan(entry, plan)
        for name, content in plan.settings.items():
            print(f"\n--- {name}\n{content}", end="")
        return
    result, = flashed((entry,), choices, 1)
    if result.error is not None:
        raise result.error
    if choices.as_json:
        terminal.show(result.plain)
    else:
        print(f"{entry.name}: {result.outcome}")


def every(path: Path, choices: Choices, *, jobs: int, waves: str = "", most_failures: int = 0) -> None:
    """``--all INVENTORY.toml``. waves: as in ``1,5,20``. Raises ConfigError, and FlashError if a device failed, after
    all were tried or the waves have halted."""
    sizes = side_by_side.sizes_of(waves, "--waves")
    entries = inventory.load(path)
    if choices.dry_run:
        plans = [(entry, _planned(entry, choices)) for entry in entries]
        if choices.as_json:
            return terminal.show([_facts(*plan) for plan in plans])
        for plan in plans:
            _print_plan(*plan)
        return
    results = flashed(entries, choices, jobs, Waves(sizes, most_failures))
    if choices.as_json:
        terminal.show([result.plain for result in results])
    else:
        rows = [(result.entry.name, str(result.outcome or "failed"), f"{result.seconds:.0f}") for result in results]
        terminal.table(rows, ("device", "version", "seconds"))
    failed = [result for result in results if result.error is not None]
    if failed:
        reasons = "\n".join(f"{result.entry.name}: {result.error}" for result in failed)
        raise FlashError(f"{len(failed)} of {len(results)} devices failed:\n{reasons}",
                         hint="run the same command again: it goes on with those that are not done")


def flashed(
    entries: tuple[Entry, ...], choices: Choices, jobs: int, waves: Waves = ONE_WAVE, *, show: Show | None = None,
    stop: threading.Event | None = None,
) -> list[Result]:
    """Flashes ``jobs`` devices at a time. show: instead of stderr. stop: ends it when it is set."""

    def flash_one(entry: Entry, tell: Tell) -> Outcome:
        with (
            _connected(entry, choices, tell) as (remote, made, release_for),
            fleet_certificates.as_operator(made.fleet, made.broker) as tls,
        ):
            fleet = made.fleet.config.fleet.name
            link = MqttLink(made.broker, client_id=f"{fleet}-flash-{secrets.token_hex(4)}", **tls)
            with closing(MqttWatch(fleet, made.device.name, link, OnDevice(remote))) as watch:
                outcome = remote_install.install(remote, release_for, tell, watch=watch, patience_s=choices.patience_s)
            if outcome.changed:
                audit_log.done(made.fleet.folder, "flash", made.device.name, f"agent {outcome.version} to {entry.to}")
            return outcome

    return side_by_side.flash_all(entries, flash_one, show or side_by_side.show_for(entries), jobs, waves, stop)


@contextmanager
def _connected(
    entry: Entry, choices: Choices, tell: Tell
) -> Iterator[tuple[Remote, Prepared, Callable[[bool], Release]]]:
    """(the connected device, its device file, its release with or without a token). Raises FleetError if the device
    does not match its file."""
    with ssh_connection.Connection(ssh_connection.parse(entry.to, choices.config), entry.accept_host_key) as connection:
        tell("looking", "")
        remote = Remote(connection)
        found = remote.machine()
        made = prepare(Path(entry.file), python=found.python_version)
        if choices.fleet is not None and not made.fleet.folder.samefile(choices.fleet):
            raise ConfigError(f"is a device of another fleet, {made.fleet.folder}", where=entry.file)
        refuse(found, made.machine, remote.where)
        tell("making the program", "")
        with BUILD_LOCK:
            built = program.make(made.machine, made.wheels, say=lambda line: tell("making the program", line))

        def release_for(with_token: bool) -> Release:
            secret = invited(made) if with_token else None
            return release.of(package_of(made, built, secret, with_token=with_token))

        yield remote, made, release_for


def _planned(entry: Entry, choices: Choices) -> Plan:
    """What would be done; no token is made."""
    with _connected(entry, choices, lambda stage, far: None) as (remote, made, _):
        built = program.make(made.machine, made.wheels, say=lambda line: None)
        return remote_install.plan(
            remote, lambda with_token: release.of(package_of(made, built, None, with_token=with_token))
        )


def _facts(entry: Entry, plan: Plan) -> dict[str, object]:
    return {"device": entry.name, "to": entry.to, "written": False, **schema.plain(plan)}


def _print_plan(entry: Entry, plan: Plan) -> None:
    runs = f"runs {plan.runs}" if plan.runs else "runs nothing yet"
    print(f"{entry.name} at {entry.to} {runs}; of {plan.version} {plan.send_bytes / 1e6:.1f} MB at most would be sent")
    for path in plan.settings:
        print(f"  {path} would be written")
