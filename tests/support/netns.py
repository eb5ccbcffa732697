"""Network namespaces: a star of devices around one hub, where the kernel counts every byte.

A wire carries only IPv4: neighbours are fixed and IPv6 is off. Segments leave one by one (``gso_max_segs 1``), as on a
real network card, so that an interface's packets are TCP segments. One processor receives, which keeps the order, and
tail-loss probes are off; otherwise a busy machine retransmits what was not lost. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S

ETHERNET_BYTES = 14
SETTINGS = {"ipv6/conf/all/disable_ipv6": "1", "ipv6/conf/default/disable_ipv6": "1", "ipv4/tcp_early_retrans": "0"}
CLONE_NEWNET = 0x40000000
FOLDERS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@dataclass(frozen=True)
class WireTraffic:
    """Traffic of an interface as its namespace sent and received it; bytes count from the IP header on."""

    sent: int
    received: int
    sent_packets: int
    received_packets: int

    def __sub__(self, before: WireTraffic) -> WireTraffic:
        return WireTraffic(
            self.sent - before.sent, self.received - before.received, self.sent_packets - before.sent_packets,
            self.received_packets - before.received_packets,
        )


@dataclass(frozen=True)
class Wire:
    """A namespace with one interface, ``eth``, that leads to the hub. address: its own. hub: the hub's."""

    namespace: str
    address: str
    hub: str

    def command(self, *command: str) -> tuple[str, ...]:
        """``command`` wrapped to run in this namespace."""
        return within(self.namespace, *command)

    def passed(self) -> WireTraffic:
        """The traffic since the wire was made."""
        answer = _ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth")
        counts = json.loads(answer)[0]["stats64"]
        tx, rx = counts["tx"], counts["rx"]
        assert tx["dropped"] == tx["errors"] == rx["dropped"] == rx["errors"] == 0, counts
        return WireTraffic(
            tx["bytes"] - ETHERNET_BYTES * tx["packets"], rx["bytes"] - ETHERNET_BYTES * rx["packets"],
            tx["packets"], rx["packets"],
        )


@dataclass(frozen=True)
class Star:
    """hub: the namespace in the middle, for brokers. Every wire leads to another namespace."""

    hub: str
    wires: tuple[Wire, ...]

    def command(self, *command: str) -> tuple[str, ...]:
        """``command`` wrapped to run in the hub."""
        return within(self.hub, *command)


@cache
def unavailable() -> str | None:
    """Why namespaces cannot be used here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip", path=FOLDERS) is None:
        return "network namespaces need the command ip (iproute2)"
    name = f"mf-{secrets.token_hex(4)}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def names() -> str:
    """A line for each network namespace."""
    return _ip("netns", "list")


def need_namespaces() -> None:
    """Skip the test where namespaces cannot be used."""
    if (reason := unavailable()) is not None:
        pytest.skip(reason)


@contextmanager
def star(devices: int) -> Iterator[Star]:
    """A hub and ``devices`` wires, removed at the end."""
    tag = f"mf-{secrets.token_hex(4)}"
    hub = f"{tag}-hub"
    made: list[str] = []
    try:
        _namespace(hub, made)
        wires = tuple(_wire(tag, hub, k, made) for k in range(devices))
        yield Star(hub, wires)
    finally:
        for name in made:
            subprocess.run([_program(), "netns", "del", name], check=False, capture_output=True)


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Sockets that this thread opens in the block belong to ``namespace``."""
    with open("/proc/thread-self/ns/net", "rb") as before, open(f"/var/run/netns/{namespace}", "rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def within(namespace: str, *command: str) -> tuple[str, ...]:
    """``command`` wrapped to run in ``namespace``."""
    return (_program(), "netns", "exec", namespace, *command)


def _namespace(name: str, made: list[str]) -> None:
    _ip("netns", "add", name)
    made.append(name)
    with entered(name):
        for setting, value in SETTINGS.items():
            path = Path("/proc/sys/net", setting)
            if path.exists():
                path.write_text(value)
    _ip("-n", name, "link", "set", "lo", "up")


def _wire(tag: str, hub: str, k: int, made: list[str]) -> Wire:
    """Addresses are from 198.18.0.0/15, reserved for network tests (RFC 2544)."""
    wire = Wire(f"{tag}-{k}", f"198.18.{k}.2", f"198.18.{k}.1")
    _namespace(wire.namespace, made)
    ours, theirs = f"02:00:00:00:{k:02x}:02", f"02:00:00:00:{k:02x}:01"
    one = ("gso_max_segs", "1", "numrxqueues", "1", "numtxqueues", "1")
    peer = ("peer", "name", f"w{k}", "netns", hub, "address", theirs, *one)
    _ip("-n", wire.namespace, "link", "add", "eth", "address", ours, *one, "type", "veth", *peer)
    _end(hub, f"w{k}", wire.hub, wire.address, ours)
    _end(wire.namespace, "eth", wire.address, wire.hub, theirs)
    return wire


def _end(namespace: str, device: str, address: str, neighbour: str, neighbour_mac: str) -> None:
    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
    _ip("-n", namespace, "link", "set", device, "up")
    steering = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
    _ip("netns", "exec", namespace, "sh", "-c", f"[ ! -e {steering} ] || echo 1 > {steering}")
    _ip("-n", namespace, "neigh", "replace", neighbour, "lladdr", neighbour_mac, "dev", device, "nud", "permanent")


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _program() -> str:
    return shutil.which("ip", path=FOLDERS) or "ip"


def _ip(*arguments: str) -> str:
    return subprocess.run(
        [_program(), *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE_S
    ).stdout
