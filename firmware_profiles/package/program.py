"""Makes the program that a board runs: the agent and all wheels that it needs, unpacked, as one .tar.gz.

uv picks the wheels for the board's Python and architecture and unpacks them here: the board needs only its own
``python3``, no network, pip or venv. The archive has one folder, named by version and content:

    0.1.0-3fa9c1d2e0/bin/edge-agent     starts the agent with lib/ on its path
    0.1.0-3fa9c1d2e0/bin/pause          makes the unit wait between two starts
    0.1.0-3fa9c1d2e0/bin/update         installs a program that was fetched, with bin/device.sh
    0.1.0-3fa9c1d2e0/lib/               modules and their *.dist-info
    0.1.0-3fa9c1d2e0/manifest.json      its distributions, with licences and sizes
    0.1.0-3fa9c1d2e0/sbom.cdx.json      the same as a bill of materials (CycloneDX)

Wheels of the user, with a model or a method, are unpacked with the others. Without them and without torch, packages
that nothing on a device imports are left out (``left_out.txt``). The archive is cached (``program_cache``) under a hash
of the request: agent, wheels, pins, Python and architecture. The same wheels give the same bytes, on every machine with
the same zlib: the archive depends on no time, path, user or umask of the machine.
"""

from __future__ import annotations

import contextlib
import email
import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firmware_profiles.package import agent_wheel, own_wheels, sbom
from firmware_profiles.package.agent_wheel import Wheel
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.program_cache import MAKING, Cache
from firmware_profiles.package.program_cache import sha256_of as sha256_of
from fleet_core import __version__
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, FlashError

FORMAT = 2
MANIFEST = "manifest.json"
MTIME = 315532800  # 1 January 1980, for every file: the same program, the same bytes
MOST_BILL_BYTES = 1 << 24
ORIGIN_FILES = ("direct_url.json", "uv_cache.json", "uv_build.json")
UNNEEDED = ("bin", "share", "isympy.py", ".lock")
START = """#!/bin/sh
# The agent of this folder, with the modules beside it and the system's Python.
here=$(dirname "$(dirname "$(readlink -f "$0")")")
export PYTHONPATH="$here/lib" PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1
exec python3 -m edge_agent.commands.cli "$@"
"""
PAUSE = Path(__file__).with_name("pause.sh").read_text(encoding="utf-8")
LEFT_OUT = Path(__file__).with_name("left_out.txt")
DEVICE_SCRIPTS = {"bin/update": "pulled/update.sh", "bin/device.sh": "ssh/device.sh", "bin/mender": "pulled/mender.sh"}
SCRIPTS = {"bin/edge-agent": START, "bin/pause": PAUSE,
           **{name: (Path(__file__).parents[1] / path).read_text(encoding="utf-8")
              for name, path in DEVICE_SCRIPTS.items()}}


@dataclass(frozen=True)
class Part:
    """One distribution in the program. size_bytes: of its files, unpacked."""

    name: str
    version: str
    licence: str
    size_bytes: int


@dataclass(frozen=True)
class Program:
    """version: of the agent and its content; the folder's name. path: of the .tar.gz. sha256: of the .tar.gz, in hex.
    built_from: where the agent's modules are from."""

    version: str
    path: Path
    sha256: str
    size_bytes: int
    installed_bytes: int
    python: str
    arch: str
    built_from: str
    parts: tuple[Part, ...]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's folder for programs."""
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "metafleet" / "programs"


def make(
    machine: Machine, wheels: Sequence[Path] = (), *, cache: Path | None = None, say: Callable[[str], None],
    index: Sequence[str] = (),
) -> Program:
    """The program for ``machine``, from the cache if possible.

    wheels: the user's own, which are added with their dependencies. index: options for uv that replace its own
    configuration, such as ``--no-index --find-links FOLDER``. Raises ConfigError if uv is not installed, FlashError if
    a wheel cannot be found.
    """
    check_python(machine)
    folder = cache_folder() if cache is None else cache
    own = {path: _digest(path) for path in wheels}
    try:
        programs = Cache(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=MAKING) as name:
            wheel = agent_wheel.make(Path(name))
            key = _key(machine, wheel, own, index)
            return _cached(programs, key) or _make(machine, wheel, own, Path(name), programs, key, index, say)
    except OSError as error:
        raise FlashError(f"cannot be written: {error.strerror or error}", where=str(folder)) from error


def _digest(path: Path) -> str:
    """SHA-256 in hex. Raises FlashError."""
    try:
        return sha256_of(path)
    except OSError as error:
        raise FlashError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def check_python(machine: Machine) -> None:
    """Raises ConfigError if the system's Python is too old for the agent."""
    version = tuple(int(part) for part in machine.python.split("."))
    if version < (3, 10):
        raise ConfigError(f"{machine.os or 'its system'} has Python {machine.python}", where=machine.board,
                          expected="3.10 or later", hint="a system with a newer Python, or one beside it")


def _key(machine: Machine, wheel: Wheel, own: Mapping[Path, str], index: Sequence[str]) -> str:
    request = [FORMAT, wheel.digest, sorted(own.values()), machine.platform, machine.python,
               sorted(machine.pins.items()), machine.torch, list(index), SCRIPTS, LEFT_OUT.read_text()]
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:32]


def _cached(cache: Cache, key: str) -> Program | None:
    """None if the program is absent or damaged."""
    entry = cache.take(key)
    if entry is None:
        return None
    facts, path = entry
    try:
        del facts["file"]
        parts = tuple(Part(**part) for part in facts.pop("parts"))
        return Program(**{**facts, "path": path, "parts": parts})
    except (KeyError, TypeError):
        return None


def _make(
    machine: Machine, wheel: Wheel, own: Mapping[Path, str], folder: Path, cache: Cache, key: str,
    index: Sequence[str], say: Callable[[str], None],
) -> Program:
    lib = folder / "lib"
    say(f"wheels for {machine.board}: CPython {machine.python}, {machine.platform}"
        + ("" if machine.torch else ", without torch"))
    _unpack(machine, wheel, tuple(own), lib, index)
    parts = tuple(_parts(lib))
    content = [wheel.digest, *sorted(own.values()), SCRIPTS, [schema.plain(p) for p in parts]]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    version = f"{__version__}-{digest[:10]}"
    about = {"version": version, "python": machine.python, "arch": machine.arch}
    manifest = json.dumps({"format": FORMAT, **about, "parts": schema.plain(parts)}, indent=1).encode()
    (folder / MANIFEST).write_bytes(manifest)
    bill = sbom.text(version, parts, [own_wheels.package(path) for path in own], MTIME)
    (folder / sbom.FILE).write_text(bill, encoding="utf-8")
    (folder / "bin").mkdir()
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    packed = folder / "program.tar.gz"
    installed = _pack(folder, version, packed)
    sha256, size = sha256_of(packed), packed.stat().st_size
    about["built_from"] = wheel.source  # a path of this machine, which is not in the archive
    facts = {**about, "file": f"{version}-{machine.arch}-cp{machine.python.replace('.', '')}.tar.gz", "sha256": sha256,
             "size_bytes": size, "installed_bytes": installed, "parts": schema.plain(parts)}
    path = cache.add(key, packed, facts)
    return Program(path=path, sha256=sha256, size_bytes=size, installed_bytes=installed, parts=parts, **about)


# uv -------------------------------------------------------------------------------------------------------------------


def _unpack(machine: Machine, wheel: Wheel, own: Sequence[Path], lib: Path, index: Sequence[str]) -> None:
    """Unpacks the agent's wheel, the user's own and their dependencies into ``lib``. Raises ConfigError, FlashError."""
    pins = wheel.path.parent / "pins.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in sorted(machine.pins.items())))
    requirements = [f"metafleet @ {wheel.path.as_uri()}", *([machine.torch] if machine.torch else [])]
    without = [] if machine.torch or own else ["--overrides", str(LEFT_OUT)]
    for path in own:  # copied, because uv misreads a path with a '#' or a '$'
        requirements.append(str(shutil.copy(path, wheel.path.parent)))
    command = [
        uv(), "pip", "install", "--quiet", "--target", str(lib), "--link-mode", "copy",
        "--python", sys.executable, "--python-platform", machine.platform, "--python-version", machine.python,
        "--only-binary", ":all:", "--constraints", str(pins), *without, *(["--no-config"] if index else []), *index,
        *requirements,
    ]
    folder = wheel.path.parent  # uv reads the configuration of a project in its working directory
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=folder)
    if done.returncode != 0:
        errors = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise FlashError(f"uv found no set of wheels for Python {machine.python} on {machine.platform}:\n{errors}",
                         where=machine.board, hint="is there a network? UV_DEFAULT_INDEX names an index of your own")
    for name in UNNEEDED:
        path = lib / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for origin in list(lib.glob(f"*.dist-info/{ORIGIN_FILES[0]}")):
        _remove_origin(origin.parent)


def _remove_origin(info: Path) -> None:
    """Removes the path that a wheel was unpacked from: it is private, and differs between runs."""
    for name in ORIGIN_FILES:
        (info / name).unlink(missing_ok=True)
    record = info / "RECORD"
    removed = (*(f"{info.name}/{name}," for name in ORIGIN_FILES), "../", "bin/")
    lines = [line for line in record.read_text().splitlines() if not line.startswith(removed)]
    record.write_text("\n".join(lines) + "\n")


def uv() -> str:
    """The path of uv. Raises ConfigError if it is not installed."""
    if importlib.util.find_spec("uv") is not None:
        from uv import find_uv_bin

        with contextlib.suppress(FileNotFoundError):
            return str(find_uv_bin())
    path = shutil.which("uv")
    if path is None:
        raise ConfigError("uv, which picks a board's wheels, is not installed", hint='pip install "metafleet[flash]"')
    return path


def _parts(lib: Path) -> Iterator[Part]:
    for info in sorted(lib.glob("*.dist-info")):
        metadata = email.message_from_string((info / "METADATA").read_text(encoding="utf-8", errors="replace"))
        record = (info / "RECORD").read_text(encoding="utf-8").splitlines()
        files = [lib / line.rsplit(",", 2)[0].strip('"') for line in record if line]
        size = sum(path.stat().st_size for path in files if path.is_file())
        yield Part(str(metadata["Name"]).lower(), str(metadata["Version"]), _licence(metadata), size)


def _licence(metadata: Any) -> str:
    """From the newest field of the core metadata that is present; long texts are cut to their first line."""
    classifiers = metadata.get_all("Classifier", [])
    classified = [line.split(" :: ")[-1] for line in classifiers if line.startswith("License ::")]
    text = metadata["License-Expression"] or ", ".join(classified) or metadata["License"] or sbom.NOT_TOLD
    return str(text).strip().splitlines()[0][:60]


# The archive ----------------------------------------------------------------------------------------------------------


def _pack(folder: Path, version: str, path: Path) -> int:
    """Archives ``bin``, ``lib``, the manifest and the bill of materials of ``folder`` under ``version``/; returns the
    size of these files in bytes."""
    names = (MANIFEST, sbom.FILE, *SCRIPTS)
    files = [folder / name for name in names] + sorted(p for p in (folder / "lib").rglob("*") if p.is_file())
    total = 0
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed, \
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            entry = tarfile.TarInfo(f"{version}/{file.relative_to(folder).as_posix()}")
            entry.size, entry.mtime, entry.mode = file.stat().st_size, MTIME, 0o644
            if file.parent.name == "bin" and file.parent.parent == folder:
                entry.mode = 0o755
            with file.open("rb") as content:
                archive.addfile(entry, content)
            total += entry.size
        archive.close()
        packed.close()
        raw.flush()
        os.fsync(raw.fileno())
    return total


def bill_of(path: Path) -> str:
    """The bill of materials in a program's archive. Raises FlashError if it has none."""
    try:
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.name.partition("/")[2] == sbom.FILE and entry.size <= MOST_BILL_BYTES:
                    content = archive.extractfile(entry)
                    assert content is not None
                    return content.read().decode()
    except (OSError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise FlashError(f"cannot be read: {error}", where=str(path), hint="metafleet programs clear") from error
    raise FlashError("has no bill of materials: an older version made it", where=str(path),
                     hint="metafleet programs clear, and flash again")


def listing(program: Program) -> list[tuple[str, str, str, str]]:
    """(name, version, licence, MiB) of each part, largest first."""
    parts = sorted(program.parts, key=lambda part: -part.size_bytes)
    return [(part.name, part.version, part.licence, f"{part.size_bytes / 2**20:.1f}") for part in parts]
