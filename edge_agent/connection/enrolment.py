"""A device with a token becomes a device of a fleet: it makes its own key and is given a certificate for it.

Nothing here is lost by a power cut: the key lies on the disk before it is used, the same key gets the same certificate
again, ``device.toml`` names the certificate once it is there, and the token is erased last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet_core.base import config, storage
from fleet_core.base.errors import ConfigError, LinkError, MessageError, StateError
from fleet_core.link.interface import Connected, Denied, Disconnected, Event, Message
from fleet_core.link.mqtt import MqttLink, parse_url
from fleet_core.protocol import certificates, enrolment_token, messages
from fleet_core.protocol.certificates import PrivateKey
from fleet_core.protocol.device_messages import EnrolAnswer, EnrolRequest
from fleet_core.protocol.enrolment_token import Token
from fleet_core.protocol.topics import enrolment_answer, enrolment_request

AGAIN_S = 3.0
POLL_S = 0.5
SYSTEM = "system"
LEFT = ".enrol-"
MAX_ANSWER_BYTES = 16_384
ANOTHER = "ask for another one: metafleet devices enroll FLEET NAME"


def token_in(home: Path, named: Path | None = None) -> Path | None:
    """The token that waits: the one that is ``named``, where there is one, or that in the home."""
    return next((path for path in (named, home / enrolment_token.FILE) if path is not None and path.is_file()), None)


def enroll(
    home: Path, path: Path, *, limit_s: float, log: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
) -> str:
    """Turns the token at ``path`` into ``device.toml``, a key and a certificate in ``home``; returns the device's name.

    Raises ConfigError for a token that is none or is of another device, LinkError when broker or aggregator did not
    answer within ``limit_s`` seconds, MessageError when the aggregator refuses the token. The token stays then.
    """
    found = _token(path)
    name = f"identity-{found.id[:8]}"
    wanted = _tables(home, found, name)
    if not (home / f"{name}.pem").exists():
        key = _own_key(home / f"{name}.key")
        answer = _ask(found, key, home, limit_s, stopped)
        authority = certificates.certificate_in(found.authority, str(path))
        own = certificates.check_own(answer, key.public_key(), found.device, authority)
        storage.write_atomic(home / f"{name}.pem", certificates.certificate_pem(own))
    if found.broker_authority != SYSTEM:
        text = found.broker_authority or found.authority
        storage.write_atomic(home / "ca.pem", certificates.pem("CERTIFICATE", text))
    wanted["tls"]["renew_after"] = certificates.renew_after(certificates.load_certificate(home / f"{name}.pem"))
    storage.write_atomic(home / "device.toml", config.toml(wanted).encode())  # with it the folder is a device's
    _forget(home, name, path, log)
    log(f"enrolled as {found.device} of fleet {found.fleet}")
    return found.device


def _token(path: Path) -> Token:
    """The token at ``path``; a damaged one would be spent and give no device. Raises ConfigError."""
    found = enrolment_token.load(path)
    trusted = () if found.broker_authority in ("", SYSTEM) else (found.broker_authority,)
    try:
        for text in (found.authority, found.certificate, *trusted):
            certificates.certificate_in(text, str(path))
        certificates.private_of(found.private_key, str(path))
    except (StateError, MessageError) as error:
        raise ConfigError(f"the token is damaged: {error.what}", where=str(path), hint=ANOTHER) from error
    for url in (found.broker, found.enrolment):
        if not parse_url(url).tls:
            raise ConfigError(f"the token names {url}", where=str(path), expected="mqtts://host[:port]", hint=ANOTHER)
    return found


def _tables(home: Path, found: Token, name: str) -> dict[str, Any]:
    """device.toml as the token makes it, with all that a person wrote beside. Raises ConfigError for another device's.
    """
    path = home / "device.toml"
    known = config.tables(config.text_of(path), str(path)) if path.exists() else {}
    before = known.get("device", {})
    identity = {"name": found.device, "fleet": found.fleet, "key": found.fleet_key}
    for key, value in identity.items():
        if before.get(key, value) != value:
            raise ConfigError(f"is another device's home: its {key} is '{str(before[key])[:80]}'", where=str(path),
                              expected=f"'{value}'", hint="give the token an empty --home")
    files = {"certificate": f"{name}.pem", "key": f"{name}.key"}
    if found.broker_authority != SYSTEM:
        files["ca"] = "ca.pem"
    return {**known, "device": {**identity, "broker": found.broker}, "tls": files}


def _own_key(path: Path) -> PrivateKey:
    """The key that this device made for this token; made now where there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        certificates.save_key(path, certificates.new_key())
    return certificates.load_key(path)


def _ask(found: Token, key: PrivateKey, home: Path, limit_s: float, stopped: Callable[[], bool]) -> str:
    """The certificate that the aggregator gives for the token."""
    csr = certificates.request(key, found.device)
    bearer = certificates.private_of(found.private_key, "the token")
    signature = certificates.sign(bearer, enrolment_token.to_sign(found.fleet, found.id, csr))
    request = messages.encode(EnrolRequest(certificates.encoded(csr), signature))
    asked, until, said = -AGAIN_S, time.monotonic() + limit_s, "no broker answered"
    link = _link(found, home)
    link.subscribe(enrolment_answer(found.fleet, found.id))
    link.open()
    try:
        while time.monotonic() < until and not stopped():
            if link.connected and time.monotonic() - asked >= AGAIN_S:
                asked = time.monotonic()
                link.publish(enrolment_request(found.fleet, found.id), request)
            for event in link.poll(POLL_S):
                if isinstance(event, Message):
                    return _answer(event.payload)
                if isinstance(event, Connected):
                    asked = -AGAIN_S
                said = _said(event)
    finally:
        link.close()
    raise LinkError(f"not enrolled within {limit_s:g} s: {said}", where=found.enrolment,
                    hint="is the aggregator running? the token stays good until its date")


def _said(event: Event) -> str:
    match event:
        case Disconnected(reason):
            return f"no broker answered ({reason})"
        case Denied(topic, reason):
            return f"the broker denied {topic} ({reason})"
    return "the aggregator did not answer"


def _answer(payload: bytes) -> str:
    answer = messages.decode(EnrolAnswer, payload, limit=MAX_ANSWER_BYTES)
    if answer.refused:
        raise MessageError(f"the aggregator refuses the token: {answer.refused}",
                           hint=ANOTHER)
    return answer.certificate


def _link(found: Token, home: Path) -> MqttLink:
    """As the token's bearer. OpenSSL reads files: they live as long as that takes."""
    with tempfile.TemporaryDirectory(prefix=LEFT, dir=home) as folder:
        ca, cert, key = (Path(folder) / name for name in ("ca.pem", "token.pem", "token.key"))
        trusted = found.broker_authority or found.authority
        if trusted != SYSTEM:
            storage.write_atomic(ca, certificates.pem("CERTIFICATE", trusted))
        storage.write_atomic(cert, certificates.pem("CERTIFICATE", found.certificate))
        storage.write_atomic(key, certificates.pem("PRIVATE KEY", found.private_key), mode=0o600)
        return MqttLink(
            found.enrolment, client_id=found.id, ca=None if trusted == SYSTEM else ca, cert=cert, key=key,
        )


def _forget(home: Path, name: str, path: Path, log: Callable[[str], None]) -> None:
    """The token is spent: it is overwritten and erased, and so is what an earlier one gave."""
    for left in home.glob(f"{LEFT}*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    for old in (*home.glob("identity-*.pem"), *home.glob("identity-*.key")):
        if old.stem != name:
            old.unlink(missing_ok=True)
    try:
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
    except OSError as error:
        log(f"the token is spent and cannot be erased: {path}: {error.strerror or error}")
