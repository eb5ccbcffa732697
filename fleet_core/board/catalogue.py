"""The catalogue of boards: those that ship, and those in a user's folder, which take precedence."""

from __future__ import annotations

import importlib.resources
import os
from pathlib import Path

from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.board import profile as profiles
from fleet_core.board.profile import Profile

FOLDER_VARIABLE = "METAFLEET_PROFILES"
TEMPLATE = "template"


def shipped() -> Path | None:
    """The folder of the shipped profiles; None when the agent was installed without them."""
    try:
        return Path(str(importlib.resources.files("firmware_profiles"))) / "boards"
    except ModuleNotFoundError:
        return None


def files(own: Path | None = None) -> dict[str, Path]:
    """{name: file} of all boards, sorted. A user's board replaces a shipped one of the same name.

    own: the user's folder; None: the folder in METAFLEET_PROFILES, if set. Raises ConfigError when it is not a folder.
    """
    if own is None and os.environ.get(FOLDER_VARIABLE):
        own = Path(os.environ[FOLDER_VARIABLE])
    if own is not None and not own.is_dir():
        raise ConfigError("is not a folder", where=str(own), expected="a folder of profiles, NAME.toml each",
                          hint=f"--folder, or the variable {FOLDER_VARIABLE}")
    folders = [folder for folder in (shipped(), own) if folder is not None]
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}
    return {name: found[name] for name in sorted(found) if name != TEMPLATE}


def path_of(name: str, own: Path | None = None) -> Path:
    """The file of a board: ``name`` is one of ``files``, or a file that ends in .toml. Raises ConfigError."""
    if name.endswith(".toml"):
        return Path(name)
    known = files(own)
    if name not in known:
        raise ConfigError(
            f"unknown board '{name[:80]}'{schema.did_you_mean(name, known)}",
            expected=f"one of {', '.join(known)}, or a file" if known else "a file: no profiles are installed here",
            hint="metafleet profiles" if known else "",
        )
    return known[name]


def load(name: str, own: Path | None = None) -> Profile:
    """Loads a board by name. Raises ConfigError."""
    return profiles.load(path_of(name, own))


def all_of(own: Path | None = None) -> dict[str, Profile]:
    """{name: board} of all boards. Raises ConfigError that lists the mistakes of all files, including names that differ
    from the file's."""
    found: dict[str, Profile] = {}
    wrong: list[str] = []
    for name, path in files(own).items():
        try:
            board = profiles.load(path)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if board.name != name:
            wrong.append(f"{path}:1: name: '{board.name}' is not the file's name (did you mean '{name}'?)")
        found[name] = board
    if wrong:
        raise ConfigError("\n".join(wrong))
    return found
