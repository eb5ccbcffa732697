"""A fleet's folder copied while its aggregator is at work: ledger and checkpoint as they belong together.

The copy is a fleet's folder like the one that it was made of, so that it is put back by copying, and begun by ``server
start``. Left out is what the next start makes anew or asks for again: the updates of the open round, and the private
broker's store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from cloud_server.identity.fleet_certificates import SYSTEM
from cloud_server.records import checkpoint
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Round
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, StateError

FOLDERS = ("mosquitto", "operators")
BESIDE = ("served.safetensors", "published.json")
OTHERS = (".lock", ".log", ".db", ".new")
"""Suffixes of what a process that runs has there for itself."""
ATTEMPTS = 5
"""How often rounds may close while they are copied; three checkpoints are kept."""


def backup(fleet: Fleet, to: Path) -> int:
    """Makes the folder ``to``, whole or not at all, readable by its owner alone; the last closed round that it has.

    Ledger and checkpoint are read again. Raises ConfigError where ``to`` is there already, StateError for what is
    damaged or cannot be read or written.
    """
    to = to.resolve()
    if to.exists():
        raise ConfigError("is there already", where=str(to), hint="name a folder that is not, for instance by its date")
    if to.is_relative_to(fleet.folder.resolve()):
        raise ConfigError("is within the fleet's own folder", where=str(to), hint="name one on another disk")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=to.parent, prefix=f".{to.name}."))
        try:
            _copy_files(fleet, made)
            closed = _copy_state(fleet, made)
            owner = fleet.folder.stat()
            for path in (made, *made.rglob("*")):
                with contextlib.suppress(PermissionError):  # it is made by its owner then
                    os.chown(path, owner.st_uid, owner.st_gid)
                storage.sync(path)
            made.rename(to)
            storage.sync(to.parent)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        raise StateError(f"cannot be copied: {error.strerror or error}", where=str(error.filename or to),
                         hint="check free space and permissions") from error
    return closed


def _copy_files(fleet: Fleet, made: Path) -> None:
    """Settings, keys, certificates, graph and first weights, with their modes; a file that goes meanwhile was none."""
    named = fleet.config.link.ca or SYSTEM  # may lie in a folder of its own
    places = [path for name in (".", *FOLDERS) for path in sorted((fleet.folder / name).glob("[!.]*"))]
    files = [path for path in places if not path.name.startswith("ledger.sqlite") and path.suffix not in OTHERS]
    for path in [*files, *([fleet.folder / named] if named != SYSTEM and not Path(named).is_absolute() else [])]:
        if path.is_file():
            there = made / path.relative_to(fleet.folder)
            there.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                shutil.copy2(path, there)
            except FileNotFoundError:
                there.unlink(missing_ok=True)


def _copy_state(fleet: Fleet, made: Path) -> int:
    """The ledger, and the checkpoint of the round that it calls the last closed one; what is beside the checkpoints may
    be of another moment."""
    (made / "state").mkdir()
    for path in (fleet.folder / "state" / name for name in BESIDE):
        if path.exists():
            shutil.copy2(path, made / "state" / path.name)
    for _ in range(ATTEMPTS):
        ledger = made / fleet.ledger_path.name
        ledger.unlink(missing_ok=True)
        with Ledger(fleet.ledger_path, create=False) as living:
            living.copy(ledger)
        with Ledger(ledger, create=False) as copied:
            copied.check()
            closed, leaves = copied.newest(Round, status="closed") or 0, int(copied.fact("leaves") or "0")
        name = checkpoint.file_name(closed)
        try:
            shutil.copy2(fleet.folder / "state" / name, made / "state" / name)
        except FileNotFoundError:
            if not closed:
                return 0  # nothing has begun
            continue  # other rounds were closed meanwhile
        if int(checkpoint.facts(made / "state" / name).get("leaves", "0")) <= leaves:
            return closed
    raise StateError("changes faster than it can be copied", where=str(fleet.folder),
                     hint="metafleet server pause, again, and metafleet server resume, also of the copy")
