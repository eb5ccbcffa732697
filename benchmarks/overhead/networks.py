"""The network of a benchmark's processes: each device in its own network namespace, with its own link to a hub.

Needs Linux, root and iproute2; in a ``shared`` network all processes use the loopback interface instead. A link carries
nothing but the processes' own IPv4: neighbours are fixed, IPv6 is off.

Times are taken with segmentation offload, as network cards have it; without it the kernel's work for each small packet
would take most of a round. Interfaces then count large packets with one header each, so bytes are counted in a separate
run in which every TCP segment is sent by itself (``one_by_one``). There one processor receives all packets, so that
they stay in order, and tail-loss probes are off; otherwise a busy machine resends what was not lost.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

ETHERNET_BYTES = 14
HUB_ADDRESS = "198.18.0.1"  # of 198.18.0.0/15, reserved for network benchmarks (RFC 2544)
FOLDERS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@dataclass(frozen=True)
class Traffic:
    """Bytes on a link, from the IP header on, as the device sent and received them."""

    up: int
    down: int

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.up - before.up, self.down - before.down)

    @property
    def both(self) -> int:
        return self.up + self.down


@dataclass(frozen=True)
class Node:
    """A network namespace, or the machine's own network (None)."""

    namespace: str | None = None

    def command(self, *command: str) -> list[str]:
        """The command that runs ``command`` on this node."""
        return list(command) if self.namespace is None else [_ip_program(), "netns", "exec", self.namespace, *command]

    def traffic(self) -> Traffic | None:
        """The traffic on the node's link since it was made; None without a link."""
        if self.namespace is None:
            return None
        counts = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth"))[0]["stats64"]
        up, down = (counts[way]["bytes"] - ETHERNET_BYTES * counts[way]["packets"] for way in ("tx", "rx"))
        return Traffic(up, down)


@dataclass(frozen=True)
class Network:
    """hub: where broker and server run, at ``address`` for every node. nodes: one per device."""

    hub: Node
    address: str
    nodes: Sequence[Node]

    def traffic(self) -> Traffic | None:
        """The sum over all links; None without links."""
        each = [traffic for node in self.nodes if (traffic := node.traffic()) is not None]
        return Traffic(sum(p.up for p in each), sum(p.down for p in each)) if each else None


def unavailable() -> str | None:
    """Why namespaces cannot be used here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip", path=FOLDERS) is None:
        return "network namespaces need the command ip (iproute2)"
    try:
        with separate(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


def create(devices: int, *, namespaces: bool, one_by_one: bool = False) -> AbstractContextManager[Network]:
    """A context of a Network: with ``namespaces`` one per device, otherwise the machine's own network."""
    return separate(devices, one_by_one=one_by_one) if namespaces else shared(devices)


@contextmanager
def shared(devices: int) -> Iterator[Network]:
    """All processes on this machine's loopback interface."""
    yield Network(Node(), "127.0.0.1", [Node()] * devices)


@contextmanager
def separate(devices: int, *, one_by_one: bool = False) -> Iterator[Network]:
    """At most 250 devices; all namespaces are removed when the block ends, even by an error."""
    tag, made = f"mf-{os.getpid()}-{secrets.token_hex(2)}", list[str]()
    try:
        hub = _namespace(f"{tag}-hub", made)
        _ip("-n", f"{tag}-hub", "address", "add", f"{HUB_ADDRESS}/32", "dev", "lo")
        nodes = []
        for k in range(devices):
            nodes.append(_namespace(f"{tag}-{k}", made))
            _wire(f"{tag}-hub", f"{tag}-{k}", k, one_by_one)
        yield Network(hub, HUB_ADDRESS, nodes)
    finally:
        for name in made:
            subprocess.run([_ip_program(), "netns", "del", name], check=False, capture_output=True)


def _namespace(name: str, made: list[str]) -> Node:
    made.append(name)
    _ip("netns", "add", name)
    for scope in ("all", "default"):
        _write(name, f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6", "1")
    _ip("-n", name, "link", "set", "lo", "up")
    return Node(name)


def _wire(hub: str, node: str, k: int, one_by_one: bool) -> None:
    """``eth`` on the node is connected to ``w{k}`` in the hub, whose one address is behind it."""
    ends = {node: ("eth", f"198.18.{k + 1}.2", f"02:00:00:00:{k:02x}:02"),
            hub: (f"w{k}", f"198.18.{k + 1}.1", f"02:00:00:00:{k:02x}:01")}
    alone = ["gso_max_segs", "1", "numrxqueues", "1", "numtxqueues", "1"] if one_by_one else []
    (near, _, near_mac), (far, _, far_mac) = ends.values()
    _ip("-n", node, "link", "add", near, "address", near_mac, *alone, "type", "veth",
        "peer", "name", far, "netns", hub, "address", far_mac, *alone)
    for (name, (device, own, _)), (_, other, other_mac) in zip(ends.items(), reversed(ends.values()), strict=True):
        _ip("-n", name, "address", "add", f"{own}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "neigh", "replace", other, "lladdr", other_mac, "dev", device, "nud", "permanent")
        if one_by_one:
            _write(name, f"/sys/class/net/{device}/queues/rx-0/rps_cpus", "1")
            _write(name, "/proc/sys/net/ipv4/tcp_early_retrans", "0")
    _ip("-n", node, "route", "add", "default", "via", ends[hub][1])


def _write(namespace: str, setting: str, value: str) -> None:
    """Sets a kernel setting if the kernel has it."""
    _ip("netns", "exec", namespace, "sh", "-c", f"[ ! -e {setting} ] || echo {value} > {setting}")


def _ip(*arguments: str) -> str:
    return subprocess.run([_ip_program(), *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def _ip_program() -> str:
    return shutil.which("ip", path=FOLDERS) or "ip"
