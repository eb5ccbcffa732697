"""``metafleet updates``: programs that devices fetch themselves, wave by wave, where no SSH reaches.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import FLEET, JSON, seconds_of
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, shortened
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.update_record import Update
    from firmware_profiles.pulled.update_package import UpdatePackage

updates_app = typer.Typer(help="Programs that devices fetch themselves.", no_args_is_help=True)

DEVICE_FILE = Annotated[Path, typer.Argument(metavar="DEVICE.toml", help="A device file, as for 'metafleet flash': the "
                                             "program is for its board and system, with its wheels.")]
KEPT = 3
"""Number of packages that are kept in the fleet's folder."""


@updates_app.command("start")
def start(
    fleet: FLEET,
    device_file: DEVICE_FILE,
    devices: Annotated[list[str] | None, typer.Option("--device", metavar="NAME", help="Update this device; may be "
                                                      "repeated. Default: all that need the program.")] = None,
    waves: Annotated[str, typer.Option(metavar="N,N,…", help="How many devices each wave has; the last number repeats. "
                                       "A wave begins when the one before has ended.")] = "",
    most_failures: Annotated[int, typer.Option(min=0, help="Begin no further wave when more devices than this have "
                                                           "failed.")] = 0,
    within: Annotated[str, typer.Option(help="How long a wave may take: 30m, 24h, 7d.")] = "24h",
    url: Annotated[str, typer.Option(metavar="HTTPS", help="Devices fetch the program from this address, on a plain "
                                     "file server, instead of from the broker.")] = "",
    as_json: JSON = False,
) -> None:
    """Sign a program for this fleet's devices of one kind, and announce it to them in waves."""
    from cloud_server.identity import audit_log
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records import update_record
    from cloud_server.records.fleet_folder import Fleet
    from firmware_profiles.pulled import update_package
    from firmware_profiles.ssh.side_by_side import sizes_of
    from fleet_core.base import storage
    from fleet_core.protocol import program_statement

    made = Fleet.load(fleet)
    sizes, within_s = sizes_of(waves, "--waves"), seconds_of(within, "--within")
    if url and not url.startswith("https://"):
        raise ConfigError("is not an https address", where=f"--url {url[:200]}",
                          hint="a device checks the server's name")
    with Ledger(made.ledger_path, create=False) as ledger:
        _check_none_runs(made, ledger)
        package = package_of(device_file, made)
        names = _chosen(ledger, made, package, devices or [])
        serial = program_statement.parse(package.statement.partition(b"\n")[2]).serial
        folder = made.folder / update_record.FOLDER / str(serial)
        update_package.save(package, folder)
        plan = update_record.Plan(serial, package.version, package.system, tuple(names), sizes, most_failures, within_s,
                                  url)
        storage.write_json(folder / update_record.PLAN, schema.plain(plan))
        ledger.request("update", f"start {serial}")
    _keep_few(folder)
    audit_log.done(made.folder, "update", text=f"{package.version} for {len(names)} devices: start")
    if as_json:
        return terminal.show(schema.plain(plan))
    print(f"{package.version} for {', '.join(shortened(names))}")
    if url:
        processes.say(f"devices will look for {folder / program_statement.ARCHIVE} at {url}")
    if not made.running():
        processes.say(f"it begins when the aggregator runs: metafleet server start {typed(fleet)}")
    processes.say(f"its progress: metafleet updates status {typed(fleet)}")


@updates_app.command("status")
def status(fleet: FLEET, as_json: JSON = False) -> None:
    """Show the progress of the fleet's last update: its waves, its devices, and why a device failed."""
    from cloud_server.records import update_record
    from cloud_server.records.fleet_folder import Fleet

    update = update_record.read(Fleet.load(fleet).folder)
    if as_json:
        return terminal.show(None if update is None else schema.plain(update))
    if update is None:
        return processes.say("no update yet: metafleet updates start")
    for line in lines(facts(update), fleet):
        print(line)
    rows = [(name, str(one.wave + 1), one.st, one.why) for name, one in
            sorted(update.devices.items(), key=lambda item: (item[1].wave, item[0]))]
    terminal.table(rows, ("device", "wave", "state", "why"))


@updates_app.command("resume")
def resume(fleet: FLEET) -> None:
    """Continue a halted or aborted update with the devices that do not run it yet."""
    _asked(fleet, "resume")


@updates_app.command("abort")
def abort(fleet: FLEET) -> None:
    """End an update: no further wave begins, and devices that have not installed it fetch nothing more."""
    _asked(fleet, "abort")


@updates_app.command("save")
def save(
    fleet: FLEET,
    device_file: DEVICE_FILE,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    older: Annotated[bool, typer.Option("--older", help="Let devices install it even if they have had a newer "
                                                        "one.")] = False,
) -> None:
    """Write the signed program as files, for a plain file server or a Mender artifact."""
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet
    from firmware_profiles.pulled import update_package

    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("is not empty", where=str(folder))
    made = Fleet.load(fleet)
    package = package_of(device_file, made, older=older)
    update_package.save(package, folder)
    audit_log.done(made.folder, "update", text=f"{package.version} saved as files{', older allowed' if older else ''}")
    print(folder)


def package_of(device_file: Path, fleet: Fleet, *, older: bool = False) -> UpdatePackage:
    """The signed program for devices like this one. Raises FleetError."""
    from cloud_server.devices import prepare_flash
    from firmware_profiles.package import program
    from firmware_profiles.pulled import update_package

    made = prepare_flash.prepare(device_file)
    if not made.fleet.folder.samefile(fleet.folder):
        raise ConfigError(f"is a device of another fleet, {made.fleet.folder}", where=str(device_file))
    built = program.make(made.machine, made.wheels, say=processes.say)
    return update_package.of(prepare_flash.package_of(made, built, None, with_token=False), older=older)


def _check_none_runs(fleet: Fleet, ledger: Ledger) -> None:
    from cloud_server.records import update_record

    update = update_record.read(fleet.folder)
    if "update" in ledger.requests() or (update is not None and update.st == update_record.RUNNING):
        raise ConfigError("an update is under way", where=str(fleet.folder),
                          hint=f"metafleet updates abort {typed(fleet.folder)}")


def _chosen(ledger: Ledger, fleet: Fleet, package: UpdatePackage, named: list[str]) -> list[str]:
    """The devices to update. Raises ConfigError for a device that cannot be updated, and if there is no device."""
    enrolled = {device.name: device for device in ledger.devices() if device.status == "enrolled"}
    systems = {name: (device.capabilities.get("update") or {}).get("system", "") for name, device in enrolled.items()}
    for name in named:
        if systems.get(name) != package.system:
            what = f"is for {systems[name]}" if systems.get(name) else "fetches no programs, or has not been on yet"
            raise ConfigError(what if name in enrolled else "is not enrolled", where=name, expected=package.system,
                              hint=f"metafleet devices list {typed(fleet.folder)}")
    found = list(dict.fromkeys(named)) or sorted(
        name for name, system in systems.items()
        if system == package.system and enrolled[name].version != package.version
    )
    if not found:
        raise ConfigError(f"no device of this fleet needs {package.version}, for {package.system}",
                          where=str(fleet.folder), hint="only agents that were flashed fetch programs")
    return found


def ask(fleet: Fleet, what: str) -> str:
    """Asks the aggregator to ``resume`` or ``abort`` the update. Returns a sentence. Raises ConfigError if there is
    nothing to resume or to abort."""
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records import update_record

    update, states = update_record.read(fleet.folder), update_record.ASKED_IN[what]
    if update is None or update.st not in states:
        raise ConfigError("there is no update" if update is None else f"the update is {update.st}",
                          where=str(fleet.folder), expected=" or ".join(states))
    with Ledger(fleet.ledger_path, create=False) as ledger:
        ledger.request("update", f"{what} {time.time()}")
    return f"{update.plan.version}: {what} requested"


def _asked(folder: Path, what: str) -> None:
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet

    said = ask(Fleet.load(folder), what)
    audit_log.done(folder, "update", text=said)
    print(said)


def _keep_few(folder: Path) -> None:
    """Deletes all but the newest few packages beside ``folder``."""
    serials = sorted((path for path in folder.parent.iterdir() if path.name.isdecimal()), key=lambda p: int(p.name))
    for path in serials[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def lines(facts: dict[str, Any], fleet: Path) -> Iterator[str]:
    """The progress of an update, in words."""
    told = ", ".join(f"{len(facts[st])} {st}" for st in ("done", "going", "waiting", "failed") if facts[st])
    yield f"update {facts['version']} is {facts['st']}{': ' if facts['why'] else ''}{facts['why']}; {told}"
    if facts["st"] in ("halted", "aborted"):
        yield f"to continue with the devices that do not run it: metafleet updates resume {typed(fleet)}"


def facts(update: Update) -> dict[str, Any]:
    """The progress of an update as plain values, for 'server status'."""
    return {"version": update.plan.version, "st": update.st, "why": update.why,
            **{st: update.of(st) for st in ("done", "going", "waiting", "failed")}}
