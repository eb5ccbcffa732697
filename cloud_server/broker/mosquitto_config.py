"""A configuration for mosquitto: mutual TLS, and topics by the name in the client's certificate.

All that a broker needs lies in one folder, which can be copied to another machine. There are two ports: one for who has
a certificate of the fleet's authority, and one where a token opens nothing but its own enrolment. They trust different
authorities, so that a token is nobody at the first port, and a device nobody at the second.

Source: mosquitto.conf(5), of 2.0. ``%u`` is the certificate's common name; a client's id is its name too, so that
nobody can disconnect another by taking its id.
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
"""Names in certificates that no device can have, for the dot is in no device's name. The operator has several: a broker
keeps one connection a name."""
PORT, ENROLMENT_PORT = 8883, 8884

# What is retained is saved at an orderly stop and after every 100 changes: each save rewrites the whole store, so that
# saving after every change would write a model's chunks hundreds of times over. What a kill loses, its publisher
# publishes again when it is connected again. The queue has a number because 0, no limit, dropped messages.
KEEPING = """\
persistence true
persistence_location {data}/
autosave_on_changes true
autosave_interval 100
max_queued_messages 4000
set_tcp_nodelay true
sys_interval 0
log_dest stderr
log_type error
log_type warning
log_type notice
"""

CONFIG = """\
# Written by 'metafleet server config'. When a device is revoked acl and crl.pem are written again.
# The paths are those of the folder that --at names. mosquitto's user must be able to read server.key.
per_listener_settings true
""" + KEEPING + """
# Devices, the aggregator and the operator: a certificate of the fleet's authority that is not revoked.
listener {port}{listen}
cafile {at}/ca.pem
crlfile {at}/crl.pem
acl_file {at}/acl
{tls}
# A token's bearer: nothing but its own enrolment.
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
class Place:
    """What a configuration was written for. hosts: names and addresses in the broker's certificate, that under which
    devices find it first. listen: the address to listen on, empty for all. at: the folder where the broker finds its
    files, empty for the one in which they are written."""

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


def write(folder: Path, fleet: str, place: Place, denied: Iterable[str]) -> Path:
    """mosquitto.conf and the lists of who may do what, in ``folder``; certificates and keys are not written here.
    denied: revoked devices. Returns the configuration's path."""
    at = place.at or str(folder.resolve())
    text = CONFIG.format(
        at=at, data=at, port=place.port, enrolment_port=place.enrolment_port, tls=TLS.format(at=at),
        listen=f" {place.listen}" if place.listen else "",
    )
    if not place.at and os.geteuid() == 0:
        text += "user root\n"
    write_access(folder, fleet, denied)
    storage.write_atomic(folder / "acl-enrolment", enrolment_access(fleet).encode())
    storage.write_atomic(folder / "broker.toml", config.toml(schema.plain(place)).encode())
    path = folder / "mosquitto.conf"
    storage.write_atomic(path, text.encode())
    return path


def write_access(folder: Path, fleet: str, denied: Iterable[str]) -> None:
    """Who may do what at the fleet's own port."""
    storage.write_atomic(folder / "acl", access(fleet, denied).encode())


def access(fleet: str, denied: Iterable[str]) -> str:
    """The access list of the fleet's own port. A device that was revoked is denied everything, at once: the list is
    read again at a SIGHUP, also for who is connected, and a revoked certificate only when it connects anew."""
    top = f"{ROOT}/{fleet}"
    writes = ("r/#", "b/#", "srv", "a/+/dn", "en/+/ans")
    reads = ("r/#", "b/#", "a/+/st", "a/+/rep", "a/+/up/#", "en/+/req")
    own = ("up/#", "st", "rep", "an/#")
    lines = [f"user {AGGREGATOR}"]
    lines += [*(f"topic write {top}/{t}" for t in writes), *(f"topic read {top}/{t}" for t in reads)]
    for name in OPERATORS:
        lines += ["", f"user {name}", f"topic write {top}/a/+/q/+"]
        lines += [f"topic read {top}/a/+/{t}" for t in ("an/+", "st")]
    lines.append("")
    for name in sorted(denied):
        lines += [f"user {topics.check_name(name, 'device')}", "topic deny #", ""]
    lines += [*(f"pattern write {top}/a/%u/{t}" for t in own), *(f"pattern read {top}/a/%u/{t}" for t in ("dn", "q/#"))]
    lines += [f"pattern read {top}/{t}" for t in ("r/#", "b/#", "srv")]
    return "\n".join(lines) + "\n"


def enrolment_access(fleet: str) -> str:
    """The access list of the port for enrolment."""
    top = f"{ROOT}/{fleet}/en/%u"
    return f"pattern write {top}/req\npattern read {top}/ans\n"
