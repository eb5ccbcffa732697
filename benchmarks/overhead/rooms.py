"""Where the processes of a benchmark run: each device in a network namespace of its own, on a wire of its own to a hub.

Needs Linux, root and iproute2; ``shared_room`` is everybody on the loopback interface instead. A wire carries nothing
but the processes' own IPv4: neighbours are fixed, IPv6 is off.

Times are taken with segmentation offload, as network cards have it: without it the kernel's work for each small packet
would be the better part of a round. Interfaces then count large packets with one header each; so bytes are counted in a
run of its own, over wires that TCP's segments leave one by one (``one_by_one``), where one processor takes what arrives
so that order is kept, and tail-loss probes are off: else a busy machine sends again what was not lost.
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
HUB_ADDRESS = "198.18.0.1"  # of 198.18.0.0/15, which is kept for measuring networks (RFC 2544)
FOLDERS = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@dataclass(frozen=True)
class Passed:
    """Bytes that crossed a wire, from the IP header on, as the device sent and received them."""

    up: int
    down: int

    def __sub__(self, before: Passed) -> Passed:
        return Passed(self.up - before.up, self.down - before.down)

    @property
    def both(self) -> int:
        return self.up + self.down


@dataclass(frozen=True)
class Room:
    """A network namespace, or the machine's own network (None)."""

    namespace: str | None = None

    def command(self, *command: str) -> list[str]:
        """The command that runs ``command`` in this room."""
        return list(command) if self.namespace is None else [_ip_program(), "netns", "exec", self.namespace, *command]

    def passed(self) -> Passed | None:
        """What crossed the room's wire since it was made; None without a wire."""
        if self.namespace is None:
            return None
        counts = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", "dev", "eth"))[0]["stats64"]
        up, down = (counts[way]["bytes"] - ETHERNET_BYTES * counts[way]["packets"] for way in ("tx", "rx"))
        return Passed(up, down)


@dataclass(frozen=True)
class House:
    """hub: where broker and server run, at ``address`` for every room. rooms: one per device."""

    hub: Room
    address: str
    rooms: Sequence[Room]

    def passed(self) -> Passed | None:
        """The sum over all wires; None without wires."""
        each = [passed for room in self.rooms if (passed := room.passed()) is not None]
        return Passed(sum(p.up for p in each), sum(p.down for p in each)) if each else None


def unavailable() -> str | None:
    """Why there can be no namespaces here, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip", path=FOLDERS) is None:
        return "network namespaces need the command ip (iproute2)"
    try:
        with separate_rooms(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


def house(devices: int, *, namespaces: bool, one_by_one: bool = False) -> AbstractContextManager[House]:
    """A context of a House: with ``namespaces`` a room per device, else one for all."""
    return separate_rooms(devices, one_by_one=one_by_one) if namespaces else shared_room(devices)


@contextmanager
def shared_room(devices: int) -> Iterator[House]:
    """Everybody on this machine's loopback interface."""
    yield House(Room(), "127.0.0.1", [Room()] * devices)


@contextmanager
def separate_rooms(devices: int, *, one_by_one: bool = False) -> Iterator[House]:
    """At most 250 devices; all namespaces are gone afterwards, however the block ends."""
    tag, made = f"mf-{os.getpid()}-{secrets.token_hex(2)}", list[str]()
    try:
        hub = _namespace(f"{tag}-hub", made)
        _ip("-n", f"{tag}-hub", "address", "add", f"{HUB_ADDRESS}/32", "dev", "lo")
        rooms = []
        for k in range(devices):
            rooms.append(_namespace(f"{tag}-{k}", made))
            _wire(f"{tag}-hub", f"{tag}-{k}", k, one_by_one)
        yield House(hub, HUB_ADDRESS, rooms)
    finally:
        for name in made:
            subprocess.run([_ip_program(), "netns", "del", name], check=False, capture_output=True)


def _namespace(name: str, made: list[str]) -> Room:
    made.append(name)
    _ip("netns", "add", name)
    for scope in ("all", "default"):
        _write(name, f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6", "1")
    _ip("-n", name, "link", "set", "lo", "up")
    return Room(name)


def _wire(hub: str, room: str, k: int, one_by_one: bool) -> None:
    """``eth`` in the room leads to ``w{k}`` in the hub; the hub's one address is behind it."""
    ends = {room: ("eth", f"198.18.{k + 1}.2", f"02:00:00:00:{k:02x}:02"),
            hub: (f"w{k}", f"198.18.{k + 1}.1", f"02:00:00:00:{k:02x}:01")}
    alone = ["gso_max_segs", "1", "numrxqueues", "1", "numtxqueues", "1"] if one_by_one else []
    (near, _, near_mac), (far, _, far_mac) = ends.values()
    _ip("-n", room, "link", "add", near, "address", near_mac, *alone, "type", "veth",
        "peer", "name", far, "netns", hub, "address", far_mac, *alone)
    for (name, (device, own, _)), (_, other, other_mac) in zip(ends.items(), reversed(ends.values()), strict=True):
        _ip("-n", name, "address", "add", f"{own}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "neigh", "replace", other, "lladdr", other_mac, "dev", device, "nud", "permanent")
        if one_by_one:
            _write(name, f"/sys/class/net/{device}/queues/rx-0/rps_cpus", "1")
            _write(name, "/proc/sys/net/ipv4/tcp_early_retrans", "0")
    _ip("-n", room, "route", "add", "default", "via", ends[hub][1])


def _write(namespace: str, setting: str, value: str) -> None:
    """A kernel's setting, where the kernel has it."""
    _ip("netns", "exec", namespace, "sh", "-c", f"[ ! -e {setting} ] || echo {value} > {setting}")


def _ip(*arguments: str) -> str:
    return subprocess.run([_ip_program(), *arguments], check=True, capture_output=True, text=True, timeout=20).stdout


def _ip_program() -> str:
    return shutil.which("ip", path=FOLDERS) or "ip"
