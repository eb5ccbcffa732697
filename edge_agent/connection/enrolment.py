"""Enrols a device with a token: the device makes a key, and the aggregator gives it a certificate.

Safe against power cuts: the key is on the disk before it is used, the same key gets the same certificate again,
``device.toml`` names the certificate once it is stored, and the token is erased last.
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

RESEND_S = 3.0
POLL_S = 0.5
SYSTEM = "system"
TEMPORARY = ".enrol-"
MAX_ANSWER_BYTES = 16_384
ANOTHER = "ask for another one: metafleet devices enroll FLEET NAME"


def enroll(
    home: Path, path: Path, *, limit_s: float, log: Callable[[str], None], stopped: Callable[[], bool] = lambda: False
) -> str:
    """Stores ``device.toml``, a key and a certificate in ``home`` by the token at ``path``; returns the device's name.

    Raises ConfigError for a damaged token or one of another device, LinkError if broker or aggregator did not answer
    within ``limit_s`` seconds, MessageError if the aggregator refuses the token. The token is then kept.
    """
    token = _load_token(path)
    name = f"identity-{token.id[:8]}"
    tables = _device_toml(home, token, name)
    if not (home / f"{name}.pem").exists():
        key = _key_at(home / f"{name}.key")
        answer = _request_certificate(token, key, home, limit_s, stopped)
        authority = certificates.certificate_in(token.authority, str(path))
        certificate = certificates.check_own(answer, key.public_key(), token.device, authority)
        storage.write_atomic(home / f"{name}.pem", certificates.certificate_pem(certificate))
    if token.broker_authority != SYSTEM:
        text = token.broker_authority or token.authority
        storage.write_atomic(home / "ca.pem", certificates.pem("CERTIFICATE", text))
    tables["tls"]["renew_after"] = certificates.renew_after(certificates.load_certificate(home / f"{name}.pem"))
    storage.write_atomic(home / "device.toml", config.toml(tables).encode())  # completes the enrolment
    _erase_token(home, name, path, log)
    log(f"enrolled as {token.device} of fleet {token.fleet}")
    return token.device


def _load_token(path: Path) -> Token:
    """Checks the whole token before it is spent. Raises ConfigError."""
    token = enrolment_token.load(path)
    trusted = () if token.broker_authority in ("", SYSTEM) else (token.broker_authority,)
    try:
        for text in (token.authority, token.certificate, *trusted):
            certificates.certificate_in(text, str(path))
        certificates.private_of(token.private_key, str(path))
    except (StateError, MessageError) as error:
        raise ConfigError(f"the token is damaged: {error.what}", where=str(path), hint=ANOTHER) from error
    for url in (token.broker, token.enrolment):
        if not parse_url(url).tls:
            raise ConfigError(f"the token names {url}", where=str(path), expected="mqtts://host[:port]", hint=ANOTHER)
    return token


def _device_toml(home: Path, token: Token, name: str) -> dict[str, Any]:
    """The tables of device.toml: identity and TLS files of the token, other tables as they are. Raises ConfigError if
    it is another device's."""
    path = home / "device.toml"
    tables = config.tables(config.text_of(path), str(path)) if path.exists() else {}
    before = tables.get("device", {})
    identity = {"name": token.device, "fleet": token.fleet, "key": token.fleet_key}
    for key, value in identity.items():
        if key != "key" and before.get(key, value) != value:  # a token may bring the fleet's new key
            raise ConfigError(f"is another device's home: its {key} is '{str(before[key])[:80]}'", where=str(path),
                              expected=f"'{value}'", hint="give the token an empty --home")
    files = {"certificate": f"{name}.pem", "key": f"{name}.key"}
    if token.broker_authority != SYSTEM:
        files["ca"] = "ca.pem"
    return {**tables, "device": {**identity, "broker": token.broker}, "tls": files}


def _key_at(path: Path) -> PrivateKey:
    """The device's key for this token, made at the first call."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        certificates.save_key(path, certificates.new_key())
    return certificates.load_key(path)


def _request_certificate(
    token: Token, key: PrivateKey, home: Path, limit_s: float, stopped: Callable[[], bool]
) -> str:
    """The certificate that the aggregator gives for the token. Raises LinkError, MessageError."""
    csr = certificates.request(key, token.device)
    bearer = certificates.private_of(token.private_key, "the token")
    signature = certificates.sign(bearer, enrolment_token.to_sign(token.fleet, token.id, csr))
    request = messages.encode(EnrolRequest(certificates.encoded(csr), signature))
    sent_at, until, problem = -RESEND_S, time.monotonic() + limit_s, "no broker answered"
    link = _link(token, home)
    link.subscribe(enrolment_answer(token.fleet, token.id))
    link.open()
    try:
        while time.monotonic() < until and not stopped():
            if link.connected and time.monotonic() - sent_at >= RESEND_S:
                sent_at = time.monotonic()
                link.publish(enrolment_request(token.fleet, token.id), request)
            for event in link.poll(POLL_S):
                if isinstance(event, Message):
                    return _certificate_in(event.payload)
                if isinstance(event, Connected):
                    sent_at = -RESEND_S
                problem = _problem(event)
    finally:
        link.close()
    raise LinkError(f"not enrolled within {limit_s:g} s: {problem}", where=token.enrolment,
                    hint="is the aggregator running? the token stays valid until its date")


def _problem(event: Event) -> str:
    match event:
        case Disconnected(reason):
            return f"no broker answered ({reason})"
        case Denied(topic, reason):
            return f"the broker denied {topic} ({reason})"
    return "the aggregator did not answer"


def _certificate_in(payload: bytes) -> str:
    answer = messages.decode(EnrolAnswer, payload, limit=MAX_ANSWER_BYTES)
    if answer.refused:
        raise MessageError(f"the aggregator refuses the token: {answer.refused}", hint=ANOTHER)
    return answer.certificate


def _link(token: Token, home: Path) -> MqttLink:
    """A link that logs in with the token's certificate. OpenSSL loads it from files, which are removed at once."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=home) as folder:
        ca, cert, key = (Path(folder) / name for name in ("ca.pem", "token.pem", "token.key"))
        trusted = token.broker_authority or token.authority
        if trusted != SYSTEM:
            storage.write_atomic(ca, certificates.pem("CERTIFICATE", trusted))
        storage.write_atomic(cert, certificates.pem("CERTIFICATE", token.certificate))
        storage.write_atomic(key, certificates.pem("PRIVATE KEY", token.private_key), mode=0o600)
        return MqttLink(
            token.enrolment, client_id=token.id, ca=None if trusted == SYSTEM else ca, cert=cert, key=key,
        )


def _erase_token(home: Path, name: str, path: Path, log: Callable[[str], None]) -> None:
    """Overwrites and removes the spent token, and removes earlier identities."""
    for left in home.glob(f"{TEMPORARY}*"):  # of a process that was killed
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
