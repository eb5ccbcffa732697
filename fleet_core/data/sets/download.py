"""Downloads a registered file over HTTP: with a size limit, resuming, and checks of size and sha256."""

from __future__ import annotations

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO

from fleet_core import __version__
from fleet_core.base.errors import LinkError, StateError
from fleet_core.data.sets.registry import Original

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0
ATTEMPTS = 4  # for each URL
FIRST_WAIT_S = 1.0  # doubled at every further attempt
RETRIED = (408, 416, 425, 429, 500, 502, 503, 504)  # HTTP status codes
AGENT = f"metafleet/{__version__}"

Show = Callable[[str, int, int], None]  # file, bytes so far, bytes in all


def unseen(file: str, done: int, total: int) -> None:
    """Shows no progress."""


def download(
    original: Original, folder: Path, show: Show = unseen, *, wait: Callable[[float], None] = time.sleep
) -> tuple[Path, str]:
    """Downloads a file to ``folder``; its URLs are tried in order. Returns (path, URL).

    A later call resumes where an earlier one stopped, and returns a complete file at once. Proxies come from the
    environment, as for urllib. wait: sleeps between two attempts, given seconds.

    Raises LinkError with the failure of every URL, and StateError when the file cannot be written.
    """
    path = folder / f"{original.sha256[:16]}-{original.name}"
    reasons = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for url in original.urls:
            reason = _from(url, original, path, show, wait)
            if reason is None:
                return path, url
            reasons.append(f"{url}: {reason}")
    except _Disk as error:
        raise _unwritable(path, error.__cause__) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    raise LinkError(f"{original.name} could not be fetched:\n  " + "\n  ".join(reasons),
                    hint="try again later, which resumes the download, or use a local copy with --from")


def _unwritable(path: Path, error: BaseException | None) -> StateError:
    reason = getattr(error, "strerror", None) or error
    return StateError(f"cannot be written: {reason}", where=str(path), hint="check free space and permissions")


def digest(path: Path) -> str:
    """The sha256 of a file in hexadecimal digits."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


class _Disk(Exception):
    """The file could not be written."""


class _Wrong(Exception):
    """The received file is not the registered one and must be deleted."""


class _Other(Exception):
    """The URL announces another file; nothing was read."""


def _from(url: str, original: Original, path: Path, show: Show, wait: Callable[[float], None]) -> str | None:
    """Downloads ``path`` from one URL. Returns why it failed, or None when the file is complete and correct."""
    reason = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            wait(FIRST_WAIT_S * 2 ** (attempt - 1))
        resumed = _size(path) > 0
        try:
            _stream(url, original, path, show)
            return None
        except _Other as error:
            return str(error)
        except _Wrong as error:
            path.unlink(missing_ok=True)
            reason = str(error)
            if not resumed:
                return reason
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"HTTP {error.code} {error.reason}"
            if error.code == 416:
                path.unlink(missing_ok=True)
            if error.code not in RETRIED:
                return reason
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
    return f"{reason} ({ATTEMPTS} attempts)"


def _stream(url: str, original: Original, path: Path, show: Show) -> None:
    """Completes and checks ``path``. Raises _Wrong, _Other, _Disk, or what the connection raised."""
    have = _size(path)
    if have < original.bytes:
        request = urllib.request.Request(url, headers={"User-Agent": AGENT})
        if have:
            request.add_header("Range", f"bytes={have}-")
        with urllib.request.build_opener().open(request, timeout=TIMEOUT_S) as answer:
            if not (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
                have = 0  # the server sends the whole file
            _announced(answer.headers.get("Content-Length"), original.bytes - have)
            have = _write(answer, original, path, have, show)
    if have < original.bytes:
        raise ConnectionError(f"ended after {have} of {original.bytes} bytes")
    found = digest(path)
    if found != original.sha256:
        raise _Wrong(f"has sha256 {found}, expected {original.sha256}")


def _announced(length: str | None, wanted_bytes: int) -> None:
    if length is not None and length.isdecimal() and int(length) != wanted_bytes:
        raise _Other(f"announces {length} bytes, expected {wanted_bytes}")


def _write(answer: IO[bytes], original: Original, path: Path, have: int, show: Show) -> int:
    """Appends the answer to the first ``have`` bytes of the file. Returns the new size."""
    with _opened(path, have) as file:
        while chunk := answer.read(CHUNK_BYTES):
            have += len(chunk)
            if have > original.bytes:
                raise _Wrong(f"sends more than the expected {original.bytes} bytes")
            _put(file, chunk)
            show(original.name, have, original.bytes)
    return have


def _opened(path: Path, have: int) -> FileIO:
    try:
        return path.open("ab" if have else "wb", buffering=0)
    except OSError as error:
        raise _Disk from error


def _put(file: FileIO, chunk: bytes) -> None:
    try:
        while chunk:
            chunk = chunk[file.write(chunk) :]
    except OSError as error:
        raise _Disk from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
