"""A configuration for mosquitto: mutual TLS, and access to topics by the name in the client's certificate.

Everything a broker needs is in one folder, which can be copied to another machine. There are two ports: one for clients
with a certificate of the fleet's authority, and one where a token gives access to its own enrolment only. The ports
trust different authorities, so a token is refused at the first one and a device at the second.

Source: mosquitto.conf(5) of 2.0. ``%u`` is the certificate's common name. The client id is the same name, so that no
client can disconnect another one by using its id.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fleet_core.base import config, schema, storage
from fleet_core.protocol import topics
from fleet_core.protocol.topics import ROOT

AGGREGATOR = ".aggregator"
OPERATORS = tuple(f".operator-{n}" for n in range(32))
"""Names in certificates. No device can have such a name, because a device's name has no dot. Operators have several,
because a broker keeps one connection per name."""
PORT, ENROLMENT_PORT = 8883, 8884
# The largest packet is the largest that the aggregator and devices read (fleet_core.link.mqtt).
# Retained messages are saved at a normal stop and every ten minutes. Each save rewrites the whole store, and saving by
# changes counts every SUBSCRIBE as one: ten thousand devices that fetch a model would make hundreds of saves. The
# aggregator publishes again what a killed broker lost. The queue has an explicit limit because with 0 (no limit)
# mosquitto dropped messages.
PERSISTENCE = """\
persistence true
persistence_location {data}/
autosave_on_changes false
autosave_interval 600
max_queued_messages 4000
max_packet_size 8388608
set_tcp_nodelay true
sys_interval 0
log_dest stderr
log_type error
log_type warning
log_type notice
"""

CONFIG = """\
# Written by 'metafleet server config'. acl and crl.pem are rewritten when a device is revoked.
# The paths are in the folder given with --at. mosquitto's user must be able to read server.key.
per_listener_settings true
""" + PERSISTENCE + """
# Devices, the aggregator and operators: they need a certificate of the fleet's authority that is not revoked.
listener {port}{listen}
cafile {at}/ca.pem
crlfile {at}/crl.pem
acl_file {at}/acl
{tls}
# Devices with a token: access to their own enrolment only.
listener {enrolment_port}{listen}
cafile {at}/tokens-ca.pem
acl_file {at}/acl-enrolment
{tls}"""
TLS = """\
certfile {at}/server.pem
keyfile {at}/server.key
require_certificate true
use_identity_as_username true
use_username_as_clientid true
allow_anonymous false
"""


@dataclass(frozen=True)
class BrokerSetup:
    """The settings of a configuration. hosts: names and addresses in the broker's certificate; devices use the first
    one. listen: the address to listen on, empty for all. at: the folder in which the broker will find its files, empty
    for the folder they are written to."""

    hosts: tuple[str, ...] = field(metadata={"max_length": 100})
    port: int = field(default=PORT, metadata={"min": 1, "max": 65535})
    enrolment_port: int = field(default=ENROLMENT_PORT, metadata={"min": 1, "max": 65535})
    listen: str = ""
    at: str = ""

    @property
    def url(self) -> str:
        return address(self.hosts[0], self.port)


def address(host: str, port: int, scheme: str = "mqtts") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def write(folder: Path, fleet: str, setup: BrokerSetup, denied: Iterable[str]) -> Path:
    """Writes mosquitto.conf and the access lists to ``folder``, but no certificates or keys. denied: revoked devices.
    Returns the configuration's path."""
    at = setup.at or str(folder.resolve())
    text = CONFIG.format(
        at=at, data=at, port=setup.port, enrolment_port=setup.enrolment_port, tls=TLS.format(at=at),
        listen=f" {setup.listen}" if setup.listen else "",
    )
    if not setup.at and os.geteuid() == 0:
        text += "user root\n"
    write_access(folder, fleet, denied)
    storage.write_atomic(folder / "acl-enrolment", enrolment_access(fleet).encode())
    storage.write_atomic(folder / "broker.toml", config.toml(schema.plain(setup)).encode())
    path = folder / "mosquitto.conf"
    storage.write_atomic(path, text.encode())
    return path


def write_access(folder: Path, fleet: str, denied: Iterable[str]) -> None:
    """Writes the access list of the fleet's port."""
    storage.write_atomic(folder / "acl", access(fleet, denied).encode())


def access(fleet: str, denied: Iterable[str]) -> str:
    """The access list of the fleet's port. A revoked device is denied everything, because at a SIGHUP the access list
    also applies to connected clients, while crl.pem is checked at the next connect only."""
    top = f"{ROOT}/{fleet}"
    own = ("up/+/+", "st", "rep", "an/+", "alarm")
    writes = ("r/#", "b/#", "srv", "alert/+", "a/+/dn", "en/+/ans", *(f"a/+/{t}" for t in own))  # own: to clear
    reads = ("r/#", "b/#", "en/+/req", *(f"a/+/{t}" for t in own))
    lines = [f"user {AGGREGATOR}"]
    lines += [*(f"topic write {top}/{t}" for t in writes), *(f"topic read {top}/{t}" for t in reads)]
    for name in OPERATORS:
        lines += ["", f"user {name}", f"topic write {top}/a/+/q/+"]
        lines += [f"topic read {top}/{t}" for t in ("a/+/an/+", "a/+/st", "a/+/alarm", "alert/+")]
    lines.append("")
    for name in sorted(denied):
        lines += [f"user {topics.check_name(name, 'device')}", "topic deny #", ""]
    lines += [*(f"pattern write {top}/a/%u/{t}" for t in own), *(f"pattern read {top}/a/%u/{t}" for t in ("dn", "q/#"))]
    lines += [f"pattern read {top}/{t}" for t in ("r/#", "b/#", "srv")]
    return "\n".join(lines) + "\n"


def is_denied(folder: Path, device: str) -> bool:
    """Whether the access list in ``folder`` denies the device everything."""
    path = folder / "acl"
    return path.exists() and f"\nuser {device}\ntopic deny #\n" in path.read_text(encoding="utf-8")


def enrolment_access(fleet: str) -> str:
    """The access list of the enrolment port."""
    top = f"{ROOT}/{fleet}/en/%u"
    return f"pattern write {top}/req\npattern read {top}/ans\n"
