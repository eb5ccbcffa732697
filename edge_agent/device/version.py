"""The version of the running program. A flashed program's version includes a hash of its content.

``firmware_profiles.package.program`` unpacks the agent to ``VERSION/lib`` and writes ``VERSION/manifest.json`` with the
version, as ``0.1.0-3fa9c1d2e0``. An agent from pip or a checkout has no such file.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from fleet_core import __version__
from fleet_core.base import storage
from fleet_core.base.errors import StateError

MAX_MANIFEST_BYTES = 1 << 20
FLASHED = re.compile(re.escape(__version__) + r"-[0-9A-Za-z]{1,16}")


@cache
def running() -> str:
    """``0.1.0-3fa9c1d2e0`` for a flashed program, else ``0.1.0``."""
    return version_in(Path(__file__).parents[3])


def version_in(program: Path) -> str:
    """The version in the manifest of the folder ``program``; the package's version if it is missing or of another
    release."""
    try:
        manifest = json.loads(storage.read_bytes(program / "manifest.json", limit=MAX_MANIFEST_BYTES))
        version = manifest["version"]
    except (StateError, ValueError, KeyError, TypeError):
        return __version__
    return version if isinstance(version, str) and FLASHED.fullmatch(version) else __version__
