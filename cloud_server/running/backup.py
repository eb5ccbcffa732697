"""Copies a fleet's folder, also while its aggregator runs, with a ledger and a checkpoint that belong together.

The copy is a complete fleet's folder: restore it by copying it back, then run ``server start``. The updates of the open
round and the private broker's store are left out, because devices and aggregator send them again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from cloud_server.identity.fleet_certificates import SYSTEM
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round
from cloud_server.records import checkpoint
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, StateError

FOLDERS = ("mosquitto", "operators")
OTHER_STATE = ("served.safetensors", "published.json")
SKIPPED_SUFFIXES = (".lock", ".log", ".db", ".new")
"""Suffixes of the working files of running processes."""
ATTEMPTS = 5
"""Attempts to copy ledger and checkpoint while rounds close; the aggregator keeps three checkpoints."""


def backup(fleet: Fleet, to: Path) -> int:
    """Writes the folder ``to`` atomically, readable by its owner only, and returns the last closed round in it.

    The copied ledger and checkpoint are verified. Raises ConfigError if ``to`` exists, StateError if something is
    damaged or cannot be read or written.
    """
    to = to.resolve()
    if to.exists():
        raise ConfigError("is there already", where=str(to), hint="name a new folder, for instance by date")
    if to.is_relative_to(fleet.folder.resolve()):
        raise ConfigError("is inside the fleet's own folder", where=str(to), hint="name one on another disk")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        copy = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
        try:
            _copy_files(fleet, copy)
            closed = _copy_state(fleet, copy)
            owner = fleet.folder.stat()
            for path in (copy, *copy.rglob("*")):
                with contextlib.suppress(PermissionError):  # only root can give files to another owner
                    os.chown(path, owner.st_uid, owner.st_gid)
                storage.sync(path)
            copy.rename(to)
            storage.sync(to.parent)
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
    except OSError as error:
        raise StateError(f"cannot be copied: {error.strerror or error}", where=str(error.filename or to),
                         hint="check free space and permissions") from error
    return closed


def _copy_files(fleet: Fleet, to: Path) -> None:
    """Copies settings, keys, certificates, graph and first weights with their modes. A temporary file that disappears
    meanwhile is skipped."""
    ca = fleet.config.link.ca or SYSTEM  # may be in another folder inside the fleet's
    paths = [path for name in (".", *FOLDERS) for path in sorted((fleet.folder / name).glob("[!.]*"))]
    files = [path for path in paths
             if not path.name.startswith("ledger.sqlite") and path.suffix not in SKIPPED_SUFFIXES]
    for path in [*files, *([fleet.folder / ca] if ca != SYSTEM and not Path(ca).is_absolute() else [])]:
        if path.is_file():
            target = to / path.relative_to(fleet.folder)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                shutil.copy2(path, target)
            except FileNotFoundError:
                target.unlink(missing_ok=True)


def _copy_state(fleet: Fleet, to: Path) -> int:
    """Copies the ledger and the checkpoint of its last closed round, which is returned. The other files in ``state``
    may be older or newer."""
    (to / "state").mkdir()
    for path in (fleet.folder / "state" / name for name in OTHER_STATE):
        if path.exists():
            shutil.copy2(path, to / "state" / path.name)
    for _ in range(ATTEMPTS):
        ledger_copy = to / fleet.ledger_path.name
        ledger_copy.unlink(missing_ok=True)
        with Ledger(fleet.ledger_path, create=False) as original:
            original.copy(ledger_copy)
        with Ledger(ledger_copy, create=False) as copied:
            copied.check()
            closed, leaves = copied.newest(Round, status="closed") or 0, int(copied.fact("leaves") or "0")
        name = checkpoint.file_name(closed)
        try:
            shutil.copy2(fleet.folder / "state" / name, to / "state" / name)
        except FileNotFoundError:
            if not closed:
                return 0  # no round was ever closed
            continue  # other rounds were closed meanwhile
        if int(checkpoint.facts(to / "state" / name).get("leaves", "0")) <= leaves:
            return closed
    raise StateError("changes faster than it can be copied", where=str(fleet.folder),
                     hint="run metafleet server pause, this command, then metafleet server resume for the fleet and "
                          "for the copy")
