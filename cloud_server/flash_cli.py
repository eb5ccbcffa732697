"""``metafleet flash``: from one file and one command to a device that is online.

What the other packages make is put together here: the fleet's token and broker, the board's profile, the package, and
one of the writers. ``--to`` says which: an image, or a card; nothing is asked of the fleet, and no token made, before
all that can be refused has been.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cloud_server import devices_cli, enroll, enrolment
from cloud_server.fleet import Fleet
from cloud_server.ledger import Ledger
from cloud_server.ledger_tables import Invitation
from edge_agent import settings as agents
from firmware_profiles import block, card, device_file, image, machine, package, program
from firmware_profiles.block import Card
from firmware_profiles.device_file import MASK, DeviceFile
from firmware_profiles.image import Plan
from firmware_profiles.machine import Machine
from firmware_profiles.package import File, Package
from firmware_profiles.program import Program
from firmware_profiles.progress import Progress
from fleet_core import config, runtime, schema, terminal, token
from fleet_core.board import known
from fleet_core.board import profile as boards
from fleet_core.errors import ConfigError
from fleet_core.link.mqtt import check_plain, is_loopback, parse_url
from fleet_core.schema import Problem

IMAGE, SSH = "image:", "ssh://"
DAY_S = 86400.0
VALID_S = 30 * DAY_S
TOKEN_STEP = 1024
CARD = "card-"
TABLES = {"data": agents.Data, "train": agents.Training, "personalize": agents.Personalize, "serve": agents.Serve,
          "power": agents.Power}
MAX_SHOWN_BYTES = 16_384


@dataclass(frozen=True)
class Prepared:
    """All that can be known before a token is made. broker: its URL. plain: over mqtt://, which needs no token."""

    device: DeviceFile
    fleet: Fleet
    profile: Path
    machine: Machine
    broker: str
    plain: bool


def flash(
    device: Annotated[Path | None, typer.Argument(metavar="DEVICE.toml", help="The device: name, fleet, board, "
                                                  "network.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="image:PATH|/dev/NAME|ssh://USER@HOST", help="An image to "
                                           "make, a card, or a device that runs.")] = None,
    source: Annotated[Path | None, typer.Option("--image", metavar="FILE", help="The system's image to begin from: "
                                                ".img, .img.xz, .img.zst; default: the device file's.")] = None,
    yes_erase: Annotated[str | None, typer.Option("--yes-erase", metavar="NAME", help="The card's name, as sdb: do not "
                                                  "ask before it is erased.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    inventory: Annotated[Path | None, typer.Option("--all", metavar="INVENTORY.toml", help="All devices of a "
                                                   "file, over SSH, side by side.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=24, help="With --all: how many at a time.")] = 4,
    accept_host_key: Annotated[str | None, typer.Option(metavar="FINGERPRINT", help="Over SSH: take up the host's key, "
                                                        "SHA256:..., where none is known.")] = None,
    ssh_config: Annotated[Path | None, typer.Option(metavar="FILE", help="Over SSH: not ~/.ssh/config.")] = None,
    patience_s: Annotated[int, typer.Option(min=1, max=3600, help="Over SSH: how long the device may take to be back, "
                                            "before it returns to the version before.")] = 120,
    rehearse: Annotated[bool, typer.Option("--rehearse", hidden=True, help="A loop device or a plain file is a card.")]
    = False,
) -> None:
    """Make a device of an image, a card or a board that runs: the agent, its wheels, settings and a one-time token."""
    if inventory is not None or (to or "").startswith(SSH):
        from cloud_server import flash_ssh  # which needs what is made here

        choices = flash_ssh.Choices(ssh_config, patience_s, dry_run, as_json)
        if inventory is None:
            return flash_ssh.one(_named(device), to or "", choices, accept=accept_host_key)
        if device is not None or to is not None:
            raise ConfigError("--all INVENTORY.toml has its devices, and where they are, in the file")
        return flash_ssh.every(inventory, choices, jobs=jobs)
    device = _named(device)
    if to is None:
        raise ConfigError("where is it?", expected="--to image:PATH, --to /dev/NAME or --to ssh://USER@HOST")
    made = prepare(device)
    begin = _source(made, device, source)
    found = None if to.startswith(IMAGE) else _card(to, rehearse)
    packed = package_of(made, program.make(made.machine, say=runtime.say), secret=None)
    plan = image.planned(begin, packed, made.device.masked())
    if dry_run:
        with _scratch() as folder:
            image.examine(begin, packed, made.device.masked(), folder, Progress())
    facts = {**facts_of(packed), **_plan_facts(plan), "to": to, "image": str(begin), "written": not dry_run}
    if dry_run:
        return terminal.show(facts) if as_json else _show(facts, packed)
    if found is not None:
        confirm(found, yes_erase)
    facts.update(_write(made, packed, begin, to, found, rehearse))
    if as_json:
        return terminal.show(facts)
    print(f"{made.device.name} is on {to.removeprefix(IMAGE)}: {made.machine.os or made.machine.board}, agent "
          f"{packed.program.version}")
    runtime.say(f"next: start it, with the aggregator running; then: metafleet devices list {made.fleet.folder}")


def _named(device: Path | None) -> Path:
    if device is None:
        raise ConfigError("which device?", expected="DEVICE.toml, or --all INVENTORY.toml")
    return device


# What there is before anything is written -----------------------------------------------------------------------------


def prepare(path: Path, *, python: str | None = None) -> Prepared:
    """The device file with its fleet, board and broker. python: that was found on the device. Raises ConfigError."""
    device = device_file.load(path, os.environ, partial(_problems, path.parent))
    fleet = Fleet.load(path.parent / Path(device.fleet).expanduser())
    profile = _profile(device.board, path.parent)
    train = device.train.get("enabled", True) is not False
    system = machine.of(boards.load(profile), device.os, train=train, python=python)
    program.check_python(system)
    broker = devices_cli.token_broker(device.broker, fleet)
    url = parse_url(broker)
    if is_loopback(url.host):
        raise ConfigError(f"the device would look for the broker at {url.host} on itself", where=str(path),
                          hint='broker = "mqtts://ADDRESS" as the device reaches it')
    check_plain(broker, fleet.config.link.plain)
    return Prepared(device, fleet, profile, system, broker, not url.tls)


def _profile(board: str, folder: Path) -> Path:
    """The board's file. Raises ConfigError."""
    return folder / board if board.endswith(".toml") else known.path_of(board)


def _problems(folder: Path, tables: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with what a device file names, and with the tables that the agent will read, by its own rules."""
    found = []
    for name, kind in TABLES.items():
        if isinstance(table := tables.get(name), dict):
            _, problems = schema.read(kind, table)
            found += [Problem(f"{name}.{problem.key}", problem.what, problem.hint) for problem in problems]
    fleet, board = tables.get("fleet"), tables.get("board")
    if isinstance(fleet, str) and not (folder / Path(fleet).expanduser() / "fleet.toml").is_file():
        found.append(Problem("fleet", f"there is no fleet here: '{fleet[:200]}' (metafleet init makes one)"))
    if isinstance(board, str):
        with _noted("board", found):
            if not (path := _profile(board, folder)).is_file():
                raise ConfigError(f"there is no file '{path}'")
    if isinstance(tables.get("broker"), str):
        with _noted("broker", found):
            parse_url(tables["broker"])
    return found


@contextmanager
def _noted(key: str, found: list[Problem]) -> Iterator[None]:
    """A ConfigError becomes a mistake of ``key``."""
    try:
        yield
    except ConfigError as error:
        found.append(Problem(key, error.what + (f", expected {error.expected}" if error.expected else "")))


def _source(made: Prepared, path: Path, named: Path | None) -> Path:
    if made.machine.first_boot not in ("cloud-init", "firstrun"):
        raise ConfigError(f"{made.machine.os} takes no first boot from an image or a card", where=made.machine.board,
                          hint="--to ssh://USER@HOST, once it runs")
    if named is None and made.device.image is None:
        raise ConfigError("no image to begin from is named", where=str(path),
                          hint=f'image = "FILE.img.xz", or --image FILE: {made.machine.os}')
    begin = named or path.parent / Path(made.device.image or "").expanduser()
    image.check_source(begin)
    return begin


# The package ----------------------------------------------------------------------------------------------------------


def package_of(made: Prepared, built: Program, secret: bytes | None, *, with_token: bool = True) -> Package:
    """The device's package. secret: the token; None for something as long in its place, for showing. with_token: not
    for a device that is enrolled already. Raises ConfigError."""
    tables: dict[str, Any] = {**made.device.tables, "board": {"profile": "profile.toml"}}
    home = {"profile.toml": made.profile.read_bytes()}
    if made.plain:
        with tempfile.TemporaryDirectory() as folder:
            path = enroll.device_folder(made.fleet, made.device.name, Path(folder), made.broker, **tables)
            home["device.toml"] = path.read_bytes()
    else:
        home["device.toml"] = config.toml(tables).encode()
        if with_token:
            home[token.FILE] = b"*" * len(_token(made)[0]) if secret is None else secret
    return package.make(made.device.name, made.machine, built, home, (token.FILE,))


def invited(made: Prepared) -> bytes:
    """A new one-time token for the device, which the fleet knows of from now on; empty where it needs none."""
    name = made.device.name
    with Ledger(made.fleet.ledger_path) as ledger:
        if made.plain:
            ledger.ask(f"enroll/{name}", "yes")
            return b""
        secret, invitation = _token(made)
        ledger.ask(f"invite/{invitation.id}", json.dumps(schema.plain(invitation)))
    return secret


def _token(made: Prepared) -> tuple[bytes, Invitation]:
    """A token as a file, and what the ledger would keep of it. It is none before the ledger knows of it. Filled up with
    empty lines: signatures differ by some bytes, and what is shown beforehand is as long as what is written."""
    url = enrolment.enrolment_url(made.fleet, made.broker)
    issued, invitation = enrolment.make_token(made.fleet, made.device.name, made.broker, url, VALID_S)
    text = config.toml(schema.plain(issued)).encode()
    return text + b"\n" * (-len(text) % TOKEN_STEP), invitation


# Writing --------------------------------------------------------------------------------------------------------------


def _write(
    made: Prepared, shown: Package, begin: Path, to: str, found: Card | None, rehearse: bool
) -> dict[str, Any]:
    """shown: the package without a token; one is made when the image is known to fit. Returns what there is to tell."""
    expires = {} if made.plain else {"token_expires": int(time.time() + VALID_S)}
    progress = Progress()

    def last() -> Package:
        return package_of(made, shown.program, invited(made))

    if found is None:
        image.write(begin, Path(to.removeprefix(IMAGE)), shown, made.device, progress, last=last)
        return dict(expires)
    with _scratch() as folder:
        path = folder / "card.img"
        image.write(begin, path, shown, made.device, progress, last=last)
        again = block.inspect(found.path, rehearse=rehearse)  # in the meantime it may have been mounted
        if (again.model, again.size_bytes) != (found.model, found.size_bytes):
            raise ConfigError("is another card than it was", where=str(found.path), hint="run it again")
        done = card.write(path, again, progress)
    runtime.say("ejected: it may be taken out" if done.ejected else "it may be taken out")
    return {**expires, "card": {**schema.plain(done), "model": again.model, "size_bytes": again.size_bytes}}


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for an unpacked image, on the disk: where /tmp is memory there is no room for one."""
    cache = program.cache_folder().parent
    cache.mkdir(parents=True, exist_ok=True)
    _forget_killed(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=CARD) as folder:
        yield Path(folder)


def _forget_killed(cache: Path) -> None:
    """A run that was killed leaves its image, which holds a token; one that still writes is younger than a day."""
    for folder in cache.glob(f"{CARD}*"):
        if folder.stat().st_mtime < time.time() - DAY_S:
            shutil.rmtree(folder, ignore_errors=True)


def _card(to: str, rehearse: bool) -> Card:
    if not to.startswith("/"):
        raise ConfigError("is no target", where=f"--to {to}", expected="image:PATH, /dev/NAME or ssh://USER@HOST")
    if sys.platform != "linux":
        raise ConfigError("cards are written on Linux only", where=f"--to {to}",
                          hint="--to image:PATH, and write that with Raspberry Pi Imager")
    return block.inspect(Path(to), rehearse=rehearse)


def confirm(found: Card, yes_erase: str | None) -> None:
    """Shows the card, and has its name typed. Raises ConfigError for another name."""
    name = found.path.name
    runtime.say(f"{found.shown}: everything on it will be erased")
    if yes_erase is None:
        if not sys.stdin.isatty():
            raise ConfigError("nobody is here to be asked", where=str(found.path), hint=f"--yes-erase {name}")
        yes_erase = input(f"type its name, {name}, to go on: ").strip()
    if yes_erase not in (name, str(found.path)):
        raise ConfigError(f"'{yes_erase[:80]}' is not its name, '{name}': nothing was written", where=str(found.path))


# What is shown --------------------------------------------------------------------------------------------------------


def facts_of(packed: Package) -> dict[str, Any]:
    """A package as plain JSON, without its files."""
    built = {**schema.plain(packed.program), "path": str(packed.program.path)}
    system = packed.machine
    return {"device": packed.device, "board": system.board, "os": system.os, "python": system.python,
            "arch": system.arch, "first_boot": system.first_boot, "trains": system.train, "program": built}


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return {"files": [_file_facts(file) for file in plan.files], "program_at": plan.program_at,
            "boot_free_bytes": plan.free_bytes}


def _file_facts(file: File) -> dict[str, Any]:
    """path: on the first partition. content: of a text; the plan was made without the secrets."""
    facts = {"path": file.path, "size_bytes": len(file.data), "secret": file.secret}
    if file.path.startswith(f"{package.FOLDER}/home/"):
        return {**facts, "content": f"{MASK}\n"}
    try:
        text = file.data.decode()
    except UnicodeDecodeError:
        return facts
    return {**facts, "content": text} if len(text) <= MAX_SHOWN_BYTES else facts


def _show(facts: dict[str, Any], packed: Package) -> None:
    built = packed.program
    print(f"{facts['device']}: {facts['board']}, {facts['os']}, CPython {facts['python']} {facts['arch']}")
    print(f"agent {built.version}, built from {built.built_from}; nothing is written\n")
    terminal.table(program.listing(built), ("package", "version", "licence", "MiB"))
    print(f"{len(built.parts)} packages, {built.installed_bytes / 2**20:.0f} MiB installed, "
          f"{built.size_bytes / 2**20:.0f} MiB packed\n")
    place = "the first partition" if facts["program_at"] == image.ON_FAT else "the root file system"
    rows = [(file["path"], str(file["size_bytes"]), "masked here" if file["secret"] else "") for file in facts["files"]]
    rows.append((facts["program_at"].lstrip("/"), str(built.size_bytes), f"in {place}"))
    terminal.table(rows, ("on the first partition", "bytes", ""))
    for file in facts["files"]:
        if "content" in file and file["path"] != "metafleet/install.sh":
            print(f"\n--- {file['path']}\n{file['content']}", end="")
