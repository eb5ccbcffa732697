"""``metafleet flash``: from one file and one command to a device that is online.

What ``flash_prepare`` makes of a device file goes to one of the writers. ``--to`` says which: an image, a card, or over
SSH to a board that runs (``flash_ssh``); nothing is asked of the fleet, and no token made, before all that can be
refused has been. What it needs is imported when it is called.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.devices.prepare_flash import Prepared
    from firmware_profiles.image.block_device import Card
    from firmware_profiles.image.card_image import Plan
    from firmware_profiles.package.device_package import File, Package

IMAGE, SSH = "image:", "ssh://"
DAY_S = 86400.0
CARD = "card-"
MAX_SHOWN_BYTES = 16_384


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
    from cloud_server.devices import flash_over_ssh
    from cloud_server.devices.prepare_flash import package_of, prepare
    from firmware_profiles.image import card_image
    from firmware_profiles.package import program
    from firmware_profiles.package.progress_line import Progress

    if inventory is not None or (to or "").startswith(SSH):
        choices = flash_over_ssh.Choices(ssh_config, patience_s, dry_run, as_json)
        if inventory is None:
            return flash_over_ssh.one(_named(device), to or "", choices, accept=accept_host_key)
        if device is not None or to is not None:
            raise ConfigError("--all INVENTORY.toml has its devices, and where they are, in the file")
        return flash_over_ssh.every(inventory, choices, jobs=jobs)
    device = _named(device)
    if to is None:
        raise ConfigError("where is it?", expected="--to image:PATH, --to /dev/NAME or --to ssh://USER@HOST")
    made = prepare(device)
    begin = _source(made, device, source)
    found = None if to.startswith(IMAGE) else _card(to, rehearse)
    packed = package_of(made, program.make(made.machine, made.wheels, say=processes.say), secret=None)
    plan = card_image.planned(begin, packed, made.device.masked())
    if dry_run:
        with _scratch() as folder:
            card_image.examine(begin, packed, made.device.masked(), folder, Progress())
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
    processes.say(
        f"next: start it, with the aggregator running; then: metafleet devices list {typed(made.fleet.folder)}"
    )


def _named(device: Path | None) -> Path:
    if device is None:
        raise ConfigError("which device?", expected="DEVICE.toml, or --all INVENTORY.toml")
    return device


# What there is before anything is written -----------------------------------------------------------------------------


def _source(made: Prepared, path: Path, named: Path | None) -> Path:
    from firmware_profiles.image import card_image

    if made.machine.first_boot not in ("cloud-init", "firstrun"):
        raise ConfigError(f"{made.machine.os} takes no first boot from an image or a card", where=made.machine.board,
                          hint="--to ssh://USER@HOST, once it runs")
    if named is None and made.device.image is None:
        raise ConfigError("no image to begin from is named", where=str(path),
                          hint=f'image = "FILE.img.xz", or --image FILE: {made.machine.os}')
    begin = named or path.parent / Path(made.device.image or "").expanduser()
    card_image.check_source(begin)
    return begin


# Writing --------------------------------------------------------------------------------------------------------------


def _write(
    made: Prepared, shown: Package, begin: Path, to: str, found: Card | None, rehearse: bool
) -> dict[str, Any]:
    """shown: the package without a token; one is made when the image is known to fit. Returns what there is to tell."""
    from cloud_server.devices.prepare_flash import VALID_S, invited, package_of
    from firmware_profiles.image import block_device, card, card_image
    from firmware_profiles.package.progress_line import Progress

    expires = {} if made.plain else {"token_expires": int(time.time() + VALID_S)}
    progress = Progress()

    def last() -> Package:
        return package_of(made, shown.program, invited(made))

    if found is None:
        card_image.write(begin, Path(to.removeprefix(IMAGE)), shown, made.device, progress, last=last)
        return dict(expires)
    with _scratch() as folder:
        path = folder / "card.img"
        card_image.write(begin, path, shown, made.device, progress, last=last)
        again = block_device.inspect(found.path, rehearse=rehearse)  # in the meantime it may have been mounted
        if (again.model, again.size_bytes) != (found.model, found.size_bytes):
            raise ConfigError("is another card than it was", where=str(found.path), hint="run it again")
        done = card.write(path, again, progress)
    processes.say("ejected: it may be taken out" if done.ejected else "it may be taken out")
    return {**expires, "card": {**schema.plain(done), "model": again.model, "size_bytes": again.size_bytes}}


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for an unpacked image, on the disk: where /tmp is memory there is no room for one."""
    from firmware_profiles.package import program

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
    from firmware_profiles.image import block_device

    if not to.startswith("/"):
        raise ConfigError("is no target", where=f"--to {to}", expected="image:PATH, /dev/NAME or ssh://USER@HOST")
    if sys.platform != "linux":
        raise ConfigError("cards are written on Linux only", where=f"--to {to}",
                          hint="--to image:PATH, and write that with Raspberry Pi Imager")
    return block_device.inspect(Path(to), rehearse=rehearse)


def confirm(found: Card, yes_erase: str | None) -> None:
    """Shows the card, and has its name typed. Raises ConfigError for another name."""
    name = found.path.name
    processes.say(f"{found.shown}: everything on it will be erased")
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
    from firmware_profiles.package import device_package
    from firmware_profiles.package.device_file import MASK

    facts = {"path": file.path, "size_bytes": len(file.data), "secret": file.secret}
    if file.path.startswith(f"{device_package.FOLDER}/home/"):
        return {**facts, "content": f"{MASK}\n"}
    try:
        text = file.data.decode()
    except UnicodeDecodeError:
        return facts
    return {**facts, "content": text} if len(text) <= MAX_SHOWN_BYTES else facts


def _show(facts: dict[str, Any], packed: Package) -> None:
    from firmware_profiles.image import card_image
    from firmware_profiles.package import program

    built = packed.program
    print(f"{facts['device']}: {facts['board']}, {facts['os']}, CPython {facts['python']} {facts['arch']}")
    print(f"agent {built.version}, built from {built.built_from}; nothing is written\n")
    terminal.table(program.listing(built), ("package", "version", "licence", "MiB"))
    print(f"{len(built.parts)} packages, {built.installed_bytes / 2**20:.0f} MiB installed, "
          f"{built.size_bytes / 2**20:.0f} MiB packed\n")
    place = "the first partition" if facts["program_at"] == card_image.ON_FAT else "the root file system"
    rows = [(file["path"], str(file["size_bytes"]), "masked here" if file["secret"] else "") for file in facts["files"]]
    rows.append((facts["program_at"].lstrip("/"), str(built.size_bytes), f"in {place}"))
    terminal.table(rows, ("on the first partition", "bytes", ""))
    for file in facts["files"]:
        if "content" in file and file["path"] != "metafleet/install.sh":
            print(f"\n--- {file['path']}\n{file['content']}", end="")
