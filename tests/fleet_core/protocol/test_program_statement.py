"""What is signed of a program: one canonical text, which is that of no other program."""

from __future__ import annotations

import hashlib

import pytest

from fleet_core.base.errors import MessageError
from fleet_core.protocol import program_statement
from fleet_core.protocol.program_statement import Statement, parse, parse_manifest, read_manifest, verify
from fleet_core.protocol.signing import Signer, Verifier

MANIFEST = b"".join(f"{'1' * 64}  {name}\n".encode() for name in ("bin/edge-agent", "lib/with blank (1).py"))
SIGNER = Signer(bytes(range(32)))
STATEMENT = Statement("lab", "0.1.0-3fa9c1d2e0", "3.13", "aarch64", 1766666666123,
                      hashlib.sha256(MANIFEST).hexdigest(), "a" * 64, 12345, True,
                      {"install.sh": "b" * 64, "etc/device.toml": "c" * 64})


def test_a_statement_is_read_as_it_was_written() -> None:
    assert parse(STATEMENT.text()) == STATEMENT
    assert STATEMENT.text().splitlines()[-2:] == [b"file " + b"c" * 64 + b" etc/device.toml",
                                                  b"file " + b"b" * 64 + b" install.sh"]


@pytest.mark.parametrize(("old", "new"), [
    (b"metafleet program 1", b"metafleet program 2"), (b"fleet lab", b"fleet a/b"), (b"0.1.0-", b"../"),
    (b"python 3.13", b"python 2.7"), (b"serial 1", b"serial 0"), (b"older yes", b"older maybe"), (b" 12345", b" 0"),
    (b" 12345", b" 9999999999"), (b"install.sh", b"../install.sh"), (b"install.sh", b"a/install.sh"),
    (b"etc/device.toml", b"install.sh"), (b"install.sh\n", b"install.sh"), (b"install.sh\n", b"install.sh\n\n"),
    (b"fleet lab\n", b""), (b"lab", b"l\xc3\xa4b"), (b"fleet lab\n", b"fleet lab\r\n"),
])
def test_a_text_in_any_other_form_is_refused(old: bytes, new: bytes) -> None:
    text = STATEMENT.text()
    assert old in text
    with pytest.raises(MessageError):
        parse(text.replace(old, new))


def test_a_statement_that_is_too_long_is_refused() -> None:
    many = {f"f{n:04}": "b" * 64 for n in range(program_statement.MAX_FILES + 1)}
    with pytest.raises(MessageError, match="at most 256 files"):
        Statement("lab", "1", "3.13", "aarch64", 1, "a" * 64, "a" * 64, 1, files=many).text()
    with pytest.raises(MessageError, match="65537 bytes"):
        parse(bytes(65537))


def test_only_the_fleets_key_and_name_are_accepted() -> None:
    signed, verifier = SIGNER.sign(STATEMENT.text()), Verifier(SIGNER.public)
    assert verify(signed, verifier, "lab") == STATEMENT
    for message, words in ((signed.replace(b"older yes", b"older no"), "does not match"),
                           (Signer(bytes(32)).sign(STATEMENT.text()), "is signed by key"),
                           (STATEMENT.text(), "carries no"),
                           (SIGNER.sign(b"metafleet bundle 1\n{}"), "not a statement")):
        with pytest.raises(MessageError, match=words):
            verify(message, verifier, "lab")
    with pytest.raises(MessageError, match="of the fleet 'lab'"):
        verify(signed, verifier, "attic")


def test_a_manifest_is_the_one_that_was_signed() -> None:
    assert list(read_manifest(MANIFEST, STATEMENT)) == ["bin/edge-agent", "lib/with blank (1).py"]
    with pytest.raises(MessageError, match="not the one that was signed"):
        read_manifest(MANIFEST.replace(b"1", b"2"), STATEMENT)


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "a\\b", " a", "", "a\tb", "\xe4"])
def test_a_manifest_with_a_name_outside_the_program_is_refused(name: str) -> None:
    with pytest.raises(MessageError, match="does not name a file"):
        parse_manifest(f"{'1' * 64}  {name}\n".encode())


def test_a_manifest_has_each_name_once_and_ends_with_its_last_line() -> None:
    with pytest.raises(MessageError, match="does not name a file"):
        parse_manifest(MANIFEST + MANIFEST)
    with pytest.raises(MessageError, match="malformed"):
        parse_manifest(MANIFEST[:-1])
