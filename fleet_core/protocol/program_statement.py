"""The statement of a program that the fleet's key signs before it is flashed: a short text in canonical form.

    metafleet program 1
    fleet greenhouse
    version 0.1.0-3fa9c1d2e0
    python 3.13
    arch aarch64
    serial 1766666666123
    older no
    manifest SHA256
    archive SHA256 BYTES
    file SHA256 NAME

``serial``: Unix ms of the signature. ``older yes``: the operator named a version, which may be older than the one that
runs. ``manifest``: of ``MANIFEST.sha256``, which has a line ``SHA256 NAME`` for every file of the program, as sha256sum
writes it. ``archive``: of the program's .tar.gz. ``file``: any number, of what comes with the program.

``Announcement`` tells devices over MQTT that there is such a program, and where it is.

The text is not JSON, because shells read it too. As a file it is called ``PACKAGE`` and begins with the line of
``signing``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_core.base.errors import MessageError
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.messages import whole
from fleet_core.protocol.signing import Verifier
from fleet_core.protocol.topics import NAME

FORMAT = "metafleet program 1"
FILE, MANIFEST, ARCHIVE = "PACKAGE", "MANIFEST.sha256", "program.tar.gz"
MAX_BYTES, MAX_FILES = 1 << 16, 256
MAX_ARCHIVE_BYTES = 1 << 32
MAX_MANIFEST_BYTES, MAX_MANIFEST_FILES = 1 << 25, 200_000
SHA256 = "[0-9a-f]{64}"
VERSION = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}"
"""A version is the name of a folder too."""

HEAD = re.compile(
    rf"{FORMAT}\nfleet (?P<fleet>{NAME.pattern})\nversion (?P<version>{VERSION})\n"
    r"python (?P<python>3\.[0-9]{1,2})\narch (?P<arch>[a-z0-9_]{1,32})\nserial (?P<serial>[1-9][0-9]{0,15})\n"
    rf"older (?P<older>yes|no)\nmanifest (?P<manifest>{SHA256})\narchive (?P<archive>{SHA256}) "
    r"(?P<size>[1-9][0-9]{0,9})\n",
    re.ASCII,
)
OTHER = re.compile(rf"file ({SHA256}) ([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}})")
LISTED = re.compile(rf"({SHA256})  ([!-\[\]-~][ -\[\]-~]{{0,1023}})")


@dataclass(frozen=True)
class Statement:
    """The fields of the text. archive_bytes: the archive's size. files: {name: SHA-256}."""

    fleet: str
    version: str
    python: str
    arch: str
    serial: int
    manifest: str
    archive: str
    archive_bytes: int
    older: bool = False
    files: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> bytes:
        """The canonical text. Raises MessageError for a field that it cannot express."""
        head = (f"{FORMAT}\nfleet {self.fleet}\nversion {self.version}\npython {self.python}\narch {self.arch}\n"
                f"serial {self.serial}\nolder {'yes' if self.older else 'no'}\nmanifest {self.manifest}\n"
                f"archive {self.archive} {self.archive_bytes}\n")
        data = (head + "".join(f"file {self.files[name]} {name}\n" for name in sorted(self.files))).encode()
        parse(data)
        return data


def parse(data: bytes) -> Statement:
    """Reads the text. Raises MessageError unless it is in canonical form."""
    if len(data) > MAX_BYTES:
        raise MessageError(f"a statement of {len(data)} bytes", expected=f"at most {MAX_BYTES}")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise MessageError("is not a statement of a program: it is not ASCII") from error
    head = HEAD.match(text)
    if head is None:
        raise MessageError("is not a statement of a program", expected=f"'{FORMAT}' and its lines")
    lines = text[head.end():].split("\n")
    if lines.pop() or len(lines) > MAX_FILES:
        raise MessageError("is not a statement of a program",
                           expected=f"at most {MAX_FILES} files, and a last line end")
    found = [OTHER.fullmatch(line) for line in lines]
    files = {match[2]: match[1] for match in found if match is not None}
    if len(files) != len(lines) or list(files) != sorted(files) or any(not _is_inside(name) for name in files):
        raise MessageError("has a line that does not name a file", expected="'file SHA256 NAME', sorted by name")
    size = int(head["size"])
    if size > MAX_ARCHIVE_BYTES:
        raise MessageError(f"an archive of {size} bytes", expected=f"at most {MAX_ARCHIVE_BYTES}")
    return Statement(head["fleet"], head["version"], head["python"], head["arch"], int(head["serial"]),
                     head["manifest"], head["archive"], size, head["older"] == "yes", files)


def verify(signed: bytes, verifier: Verifier, fleet: str | None = None) -> Statement:
    """The statement in a signed text, the content of ``PACKAGE``. fleet: whose program it must be; None for any. Raises
    MessageError unless the key has signed it."""
    if len(signed) > MAX_BYTES:
        raise MessageError(f"a statement of {len(signed)} bytes", expected=f"at most {MAX_BYTES}")
    statement = parse(verifier.verify(signed))
    if fleet is not None and statement.fleet != fleet:
        raise MessageError(f"is a program of the fleet '{statement.fleet}'", expected=f"'{fleet}'")
    return statement


def read_manifest(data: bytes, statement: Statement) -> dict[str, str]:
    """{name: SHA-256} of ``MANIFEST.sha256``. Raises MessageError if it is malformed, or not the statement's."""
    if len(data) > MAX_MANIFEST_BYTES or hashlib.sha256(data).hexdigest() != statement.manifest:
        raise MessageError(f"{MANIFEST} is not the one that was signed", expected=f"sha256 {statement.manifest}")
    return parse_manifest(data)


def parse_manifest(data: bytes) -> dict[str, str]:
    """{name: SHA-256}. Raises MessageError for names that leave the program's folder, or that a shell misreads."""
    lines = data.decode("ascii", "replace").split("\n")
    if lines.pop() or len(lines) > MAX_MANIFEST_FILES:
        raise MessageError(f"{MANIFEST} is malformed", expected=f"at most {MAX_MANIFEST_FILES} lines")
    files: dict[str, str] = {}
    for line in lines:
        match = LISTED.fullmatch(line)
        if match is None or match[2] in files or not _is_inside(match[2]):
            raise MessageError(f"{MANIFEST} has a line that does not name a file: {line[:100]!a}",
                               expected="'SHA256  NAME'")
        files[match[2]] = match[1]
    return files


def _is_inside(name: str) -> bool:
    return not {"", ".", ".."} & set(name.split("/"))


# What devices are told ------------------------------------------------------------------------------------------------

MAX_ANNOUNCEMENT_BYTES = 1 << 23


@dataclass(frozen=True)
class Announcement:
    """The signed message that lets devices fetch a program.

    seq: higher with every announcement. exp: Unix ms. attempt: higher when the operator tries again. program: the
    signed statement. files: {name: content} of the small files that come with it. devices: the devices that fetch it
    now. blob: the archive in chunks, whose hashes also check a download from ``url``, an https address; without one the
    chunks are on the broker.
    """

    v: int
    fleet: str = field(metadata={"max_length": 64})
    seq: int = field(metadata=whole(1 << 53, 1))
    exp: int = field(metadata=whole(1 << 53))
    attempt: int = field(metadata=whole(1_000_000, 1))
    program: str = field(metadata={"max_length": MAX_BYTES})
    blob: Blob
    files: Mapping[str, str] = field(default_factory=dict, metadata={"max_length": MAX_BYTES})
    devices: tuple[str, ...] = field(default=(), metadata={"max_length": 100_000})
    url: str = field(default="", metadata={"max_length": 2000, "pattern": r"(https://[!-~]+)?"})


def read_announcement(payload: bytes, verifier: Verifier, fleet: str) -> tuple[Announcement, Statement]:
    """(the announcement, the statement in it). Raises MessageError unless the fleet's key has signed both and they
    belong together."""
    if len(payload) > MAX_ANNOUNCEMENT_BYTES:
        raise MessageError(f"an announcement of {len(payload)} bytes", expected=f"at most {MAX_ANNOUNCEMENT_BYTES}")
    found = messages.decode(Announcement, verifier.verify(payload), limit=MAX_ANNOUNCEMENT_BYTES)
    if found.v != messages.PROTOCOL:
        raise MessageError(f"an announcement of protocol {found.v}", expected=str(messages.PROTOCOL))
    if found.fleet != fleet:
        raise MessageError(f"an announcement of the fleet '{found.fleet}'", expected=f"'{fleet}'")
    statement = verify(found.program.encode(), verifier, fleet)
    if found.blob.check(MAX_ARCHIVE_BYTES).size != statement.archive_bytes:
        raise MessageError(f"{found.blob.size} bytes are announced", expected=f"{statement.archive_bytes}, as signed")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in found.files.items()}
    if hashes != dict(statement.files):
        raise MessageError("the announced files are not those that were signed", expected=", ".join(statement.files))
    return found, statement
