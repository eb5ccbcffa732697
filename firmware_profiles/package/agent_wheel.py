"""Packs the agent as a wheel from the modules that run here, of a checkout or an installation.

Nothing is built or fetched. The wheel (PEP 427, core metadata 2.1) has what a device runs: ``fleet_core`` and
``edge_agent``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fleet_core import __version__
from fleet_core.base.errors import FlashError

PACKAGES = ("edge_agent", "fleet_core")
METADATA_FIELDS = ("Requires-Python", "License-Expression", "Provides-Extra", "Requires-Dist")
EPOCH = (1980, 1, 1, 0, 0, 0)
NOT_FOR_DEVICES = ("heartbeat.npz",)  # 3 MB of samples for the demo


@dataclass(frozen=True)
class Wheel:
    """digest: SHA-256 of the content, in hex. source: where the modules are from, for people."""

    path: Path
    digest: str
    source: str


def make(folder: Path) -> Wheel:
    """Writes the wheel to ``folder``; the same modules give the same bytes. Raises FlashError."""
    info = f"metafleet-{__version__}.dist-info"
    files = dict(_modules())
    files[f"{info}/METADATA"] = _metadata().encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: metafleet\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nedge-agent = edge_agent.commands.cli:main\n"
    record = "".join(f"{name},sha256={_base64(data)},{len(data)}\n" for name, data in sorted(files.items()))
    path = folder / f"metafleet-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(_entry(name), data)
        archive.writestr(_entry(f"{info}/RECORD"), f"{record}{info}/RECORD,,\n")
    return Wheel(path, hashlib.sha256(record.encode()).hexdigest(), _source())


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _modules() -> Iterator[tuple[str, bytes]]:
    for package in PACKAGES:
        folder = _folder(package)
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder.parent)
            if path.is_file() and "__pycache__" not in inside.parts and path.name not in NOT_FOR_DEVICES:
                yield inside.as_posix(), path.read_bytes()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FlashError(f"the package {package} is not installed as files", hint="install Metafleet again")
    return Path(next(iter(spec.submodule_search_locations)))


def _metadata() -> str:
    """The dependencies, from the installed distribution's metadata; a device needs no other field."""
    try:
        installed = importlib.metadata.metadata("metafleet")
    except importlib.metadata.PackageNotFoundError as error:
        raise FlashError("Metafleet is not installed, only its modules are here", hint="pip install it") from error
    lines = ["Metadata-Version: 2.4", "Name: metafleet", f"Version: {__version__}"]
    lines += [f"{key}: {value}" for key in METADATA_FIELDS for value in installed.get_all(key, [])]
    return "\n".join(lines) + "\n"


def _source() -> str:
    """The checkout's folder, or the installed distribution."""
    origin = json.loads(importlib.metadata.distribution("metafleet").read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable", False):
        return f"the source in {_folder('fleet_core').parent}"
    return f"the installed distribution metafleet {__version__}"
