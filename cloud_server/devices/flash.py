"""``metafleet flash``: writes an agent to an image, a card, or over SSH to a running board.

``flash`` reads the options and picks the way. For an image or a card ``_prepared_job`` checks everything, ``_write``
makes the token and writes; the one-time token is made last, after every check. SSH is in ``flash_over_ssh``. Heavy
modules are imported inside the functions.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.devices.prepare_flash import Prepared
    from firmware_profiles.image.block_device import Card
    from firmware_profiles.image.image_plan import Plan
    from firmware_profiles.package.device_package import File, Package

IMAGE, SSH = "image:", "ssh://"
DAY_S = 86400.0
SCRATCH_PREFIX = "card-"
MAX_SHOWN_BYTES = 16_384


def flash(
    device: Annotated[Path | None, typer.Argument(metavar="DEVICE.toml", help="The device: name, fleet, board, "
                                                  "network.")] = None,
    to: Annotated[str | None, typer.Option("--to", metavar="image:PATH|/dev/NAME|ssh://USER@HOST", help="A new image "
                                           "file, a card, or a running device.")] = None,
    source: Annotated[Path | None, typer.Option("--image", metavar="FILE", help="The operating system's image: .img, "
                                                ".img.xz or .img.zst; default: the one in the device file.")] = None,
    yes_erase: Annotated[str | None, typer.Option("--yes-erase", metavar="NAME", help="The card's name, for example "
                                                  "sdb: erase it without asking.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    inventory: Annotated[Path | None, typer.Option("--all", metavar="INVENTORY.toml", help="Flash all devices of a "
                                                   "file over SSH, several at a time.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=24, help="With --all: how many devices at a time.")] = 4,
    waves: Annotated[str, typer.Option(metavar="N,N,…", help="With --all: how many devices each wave has; the last "
                                       "number repeats. A wave begins when the devices of the one before are "
                                       "back.")] = "",
    most_failures: Annotated[int, typer.Option(min=0, help="With --waves: begin no further wave when more devices than "
                                               "this have failed.")] = 0,
    accept_host_key: Annotated[str | None, typer.Option(metavar="FINGERPRINT", help="Over SSH: accept this host key, "
                                                        "SHA256:..., if the host is not known yet.")] = None,
    ssh_config: Annotated[Path | None, typer.Option(metavar="FILE", help="Over SSH: use this file instead of "
                                                    "~/.ssh/config.")] = None,
    patience_s: Annotated[int, typer.Option(min=1, max=3600, help="Over SSH: seconds to wait for the device to come "
                                            "back before it returns to its former version.")] = 120,
    rehearse: Annotated[bool, typer.Option("--rehearse", hidden=True, help="Accept a loop device or a plain file as "
                                           "the card.")] = False,
) -> None:
    """Put the agent on an image, a card or a running board, with its packages, settings and a one-time token."""
    if inventory is not None or (to or "").startswith(SSH):
        from cloud_server.devices import flash_over_ssh

        choices = flash_over_ssh.Choices(ssh_config, patience_s, dry_run, as_json)
        if inventory is None:
            return flash_over_ssh.one(_required(device), to or "", choices, accept=accept_host_key)
        if device is not None or to is not None:
            raise ConfigError("--all INVENTORY.toml already names the devices and their addresses",
                              hint="leave out DEVICE.toml and --to")
        return flash_over_ssh.every(inventory, choices, jobs=jobs, waves=waves, most_failures=most_failures)
    device = _required(device)
    if to is None:
        raise ConfigError("--to is missing", expected="--to image:PATH, --to /dev/NAME or --to ssh://USER@HOST")
    job = _prepared_job(device, to, source, rehearse)
    if dry_run:
        return _dry_run(job, as_json)
    if job.card is not None:
        from firmware_profiles.image import write_card

        write_card.check(job.card, job.plan.end)
        confirm(job.card, yes_erase)
    written = _write(job, rehearse)
    _record(job)
    if as_json:
        return terminal.show({**_job_facts(job, written=True), **written})
    _print_done(job)


def _required(device: Path | None) -> Path:
    if device is None:
        raise ConfigError("no device is named", expected="DEVICE.toml, or --all INVENTORY.toml")
    return device


# Preparing and checking: nothing is written, no token is made ---------------------------------------------------------


@dataclass(frozen=True)
class ImageJob:
    """One device to be written to an image or a card. image: of the operating system. card: None for an image file.
    package: with a placeholder of the same length in place of the token."""

    prepared: Prepared
    image: Path
    to: str
    card: Card | None
    package: Package
    plan: Plan


def _prepared_job(device: Path, to: str, source: Path | None, rehearse: bool) -> ImageJob:
    """Raises FleetError for anything that would fail while writing."""
    from cloud_server.devices.prepare_flash import package_of, prepare
    from firmware_profiles.image import image_plan
    from firmware_profiles.package import program

    made = prepare(device)
    image = _system_image(made, device, source)
    card = None if to.startswith(IMAGE) else _card(to, rehearse)
    package = package_of(made, program.make(made.machine, made.wheels, say=processes.say), secret=None)
    return ImageJob(made, image, to, card, package, image_plan.planned(image, package, made.device.masked()))


def _system_image(made: Prepared, device_file: Path, source: Path | None) -> Path:
    from firmware_profiles.image import card_image

    if made.machine.first_boot not in ("cloud-init", "firstrun"):
        raise ConfigError(f"{made.machine.os} cannot be set up from an image or a card", where=made.machine.board,
                          hint="start it, then use --to ssh://USER@HOST")
    if source is None and made.device.image is None:
        raise ConfigError("the operating system's image is missing", where=str(device_file),
                          hint=f'image = "FILE.img.xz", or --image FILE: {made.machine.os}')
    image = source or device_file.parent / Path(os.path.expanduser(made.device.image or ""))
    card_image.check_source(image)
    return image


def _card(to: str, rehearse: bool) -> Card:
    from firmware_profiles.image import block_device

    if not to.startswith("/"):
        raise ConfigError("is not a target", where=f"--to {to}", expected="image:PATH, /dev/NAME or ssh://USER@HOST")
    if sys.platform != "linux":
        raise ConfigError("cards can only be written on Linux", where=f"--to {to}",
                          hint="use --to image:PATH and write that file with Raspberry Pi Imager")
    return block_device.inspect(Path(to), rehearse=rehearse)


def confirm(card: Card, yes_erase: str | None) -> None:
    """Shows the card and asks the operator to type its name. Raises ConfigError for another name."""
    name = card.path.name
    processes.say(f"{card.shown}: everything on it will be erased")
    if yes_erase is None:
        if not sys.stdin.isatty():
            raise ConfigError("erasing a card needs a confirmation, and there is no terminal to ask on",
                              where=str(card.path), hint=f"--yes-erase {name}")
        yes_erase = input(f"type its name, {name}, to go on: ").strip()
    if yes_erase not in (name, str(card.path)):
        raise ConfigError(f"'{yes_erase[:80]}' is not its name, '{name}': nothing was written", where=str(card.path))


# Writing --------------------------------------------------------------------------------------------------------------


def _write(job: ImageJob, rehearse: bool) -> dict[str, Any]:
    """Writes the image or the card, and returns what ``--json`` adds to the job's facts."""
    from cloud_server.devices.prepare_flash import VALID_S

    expires = {} if job.prepared.without_token else {"token_expires": int(time.time() + VALID_S)}
    if job.card is None:
        _write_image(job, Path(job.to.removeprefix(IMAGE)))
        return dict(expires)
    return {**expires, "card": _write_card(job, job.card, rehearse)}


def _write_image(job: ImageJob, path: Path) -> None:
    from cloud_server.devices.prepare_flash import invited, package_of
    from firmware_profiles.image import card_image
    from firmware_profiles.package.progress_line import Progress

    def with_token() -> Package:
        return package_of(job.prepared, job.package.program, invited(job.prepared))

    card_image.write(job.image, path, job.package, job.prepared.device, Progress(), last=with_token)


def _write_card(job: ImageJob, card: Card, rehearse: bool) -> dict[str, Any]:
    from firmware_profiles.image import block_device
    from firmware_profiles.image import write_card as cards
    from firmware_profiles.package.progress_line import Progress

    with _scratch_folder() as folder:
        _write_image(job, folder / "card.img")
        now = block_device.inspect(card.path, rehearse=rehearse)  # it may have been mounted in the meantime
        if (now.model, now.size_bytes) != (card.model, card.size_bytes):
            raise ConfigError("is not the same card as before", where=str(card.path), hint="run the command again")
        done = cards.write(folder / "card.img", now, Progress())
    processes.say("ejected: it may be taken out" if done.ejected else "it may be taken out")
    return {**schema.plain(done), "model": now.model, "size_bytes": now.size_bytes}


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    """A folder for an unpacked image, beside the program cache: a /tmp in memory would be too small."""
    from firmware_profiles.package import program

    cache = program.cache_folder().parent
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=SCRATCH_PREFIX) as folder:
        yield Path(folder)


def _remove_abandoned(cache: Path) -> None:
    """Removes what killed runs left: their images hold tokens. A folder younger than a day may still be in use."""
    for folder in cache.glob(f"{SCRATCH_PREFIX}*"):
        if folder.stat().st_mtime < time.time() - DAY_S:
            shutil.rmtree(folder, ignore_errors=True)


# Output ---------------------------------------------------------------------------------------------------------------


def _record(job: ImageJob) -> None:
    from cloud_server.identity import audit_log

    version = job.package.program.version
    audit_log.done(job.prepared.fleet.folder, "flash", job.prepared.device.name, f"agent {version} to {job.to}")


def _print_done(job: ImageJob) -> None:
    made, version = job.prepared, job.package.program.version
    print(f"{made.device.name} is on {job.to.removeprefix(IMAGE)}: {made.machine.os or made.machine.board}, agent "
          f"{version}")
    processes.say(
        f"next: start it, with the aggregator running; then: metafleet devices list {typed(made.fleet.folder)}"
    )


def _dry_run(job: ImageJob, as_json: bool) -> None:
    from firmware_profiles.image import card_image
    from firmware_profiles.package.progress_line import Progress

    with _scratch_folder() as folder:
        card_image.examine(job.image, job.package, job.prepared.device.masked(), folder, Progress())
    facts = _job_facts(job, written=False)
    if as_json:
        return terminal.show(facts)
    _print_plan(facts, job.package)


def _job_facts(job: ImageJob, *, written: bool) -> dict[str, Any]:
    plan = job.plan
    return {**facts_of(job.package), "files": [_file_facts(file) for file in plan.files],
            "program_at": plan.program_at, "boot_free_bytes": plan.free_bytes, "to": job.to, "image": str(job.image),
            "written": written}


def facts_of(package: Package) -> dict[str, Any]:
    """A package as plain JSON, without its files."""
    built = {**schema.plain(package.program), "path": str(package.program.path)}
    system = package.machine
    return {"device": package.device, "board": system.board, "os": system.os, "python": system.python,
            "arch": system.arch, "first_boot": system.first_boot, "torch": bool(system.torch), "program": built}


def _file_facts(file: File) -> dict[str, Any]:
    """path: on the first partition. content: of a text file that holds no secret."""
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


def _print_plan(facts: dict[str, Any], package: Package) -> None:
    from firmware_profiles.image import partition_files
    from firmware_profiles.package import program

    built = package.program
    print(f"{facts['device']}: {facts['board']}, {facts['os']}, CPython {facts['python']} {facts['arch']}")
    print(f"agent {built.version}, built from {built.built_from}; nothing is written\n")
    terminal.table(program.listing(built), ("package", "version", "licence", "MiB"))
    print(f"{len(built.parts)} packages, {built.installed_bytes / 2**20:.0f} MiB installed, "
          f"{built.size_bytes / 2**20:.0f} MiB packed\n")
    partition = "the first partition" if facts["program_at"] == partition_files.ON_FAT else "the root file system"
    rows = [(file["path"], str(file["size_bytes"]), "masked here" if file["secret"] else "") for file in facts["files"]]
    rows.append((facts["program_at"].lstrip("/"), str(built.size_bytes), f"in {partition}"))
    terminal.table(rows, ("on the first partition", "bytes", ""))
    for file in facts["files"]:
        if "content" in file and file["path"] != "metafleet/install.sh":
            print(f"\n--- {file['path']}\n{file['content']}", end="")
