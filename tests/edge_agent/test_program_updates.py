"""Which announced programs a device takes, and what happens to them after a power cut at any moment."""

from __future__ import annotations

import dataclasses
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.updates.partial_file import PartialFile
from edge_agent.updates.program_updates import ProgramUpdates, system
from firmware_profiles.pulled.update_package import UpdatePackage
from fleet_core.base.errors import MessageError
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chunks import Blob, cut
from fleet_core.protocol.program_statement import Announcement
from fleet_core.protocol.signing import Signer
from tests.support import waiting
from tests.support.fake_root import an_update
from tests.support.inprocess import Clock
from tests.support.loopback_board import SIGNING
from tests.support.pki import user_pki
from tests.support.powercut import cut_at

CHUNK = 2048
OTHER = Signer(bytes(32))


def announced(package: UpdatePackage, seq: int = 10, *, signer: Signer = SIGNING.signer, **changed: Any) -> bytes:
    blob = Blob.of(package.archive.read_bytes(), CHUNK)
    made = Announcement(1, "lab", seq, 1 << 50, 1, package.statement.decode(), blob, package.files, ("pi",))
    return signer.sign(messages.encode(dataclasses.replace(made, **changed)))


class Device:
    """An agent's updates alone, over the loopback broker. root(): what ``update-result`` is to say."""

    def __init__(self, folder: Path, broker: LoopbackBroker, version: str = "1.0-aaa", **options: Any):
        self.folder, self.broker, self.clock = folder, broker, Clock()
        self.lines: list[str] = []
        self.link = LoopbackLink(broker, "pi", None)
        self.updates = ProgramUpdates(
            "lab", "pi", SIGNING.signer.public, folder, self.link, version, clock=self.clock, now_ms=self.clock.ms,
            log=self.lines.append, result=folder / "update-result", **options)
        self.link.open()
        self.link.subscribe(topics.program("lab"))

    def step(self) -> None:
        for event in self.link.poll(0):
            topic = getattr(event, "topic", "")
            address = topics.parse("lab", topic)
            if address is not None and address.kind == "program":
                self.updates.on_announcement(getattr(event, "payload", b""))
            elif address is not None and address.kind == "b":
                self.updates.on_chunk(address.key, topics.number(address.part), getattr(event, "payload", b""))
        self.updates.tick()
        self.clock.seconds += 0.1

    def until(self, true: Callable[[], object], steps: int = 3000) -> None:
        for _ in range(steps):
            if true():
                return
            self.step()
        raise AssertionError((self.updates.state, self.lines))

    @property
    def inbox(self) -> Path:
        return self.folder / "update"

    @property
    def ready(self) -> bool:
        return (self.inbox / "ready").exists()

    def answer(self, outcome: str, why: str = "") -> None:
        asked = (self.inbox / "asked").read_text().split()
        (self.inbox / "ready").unlink()
        (self.folder / "update-result").write_text(
            f"serial={asked[0]}\nattempt={asked[1]}\noutcome={outcome}\nwhy={why}\n")


def publish(broker: LoopbackBroker, package: UpdatePackage, *, but: tuple[int, ...] = ()) -> None:
    link = LoopbackLink(broker, "server", None)
    link.open()
    link.poll(0)
    data = package.archive.read_bytes()
    blob = Blob.of(data, CHUNK)
    for k, part in enumerate(cut(data, blob)):
        if k not in but:
            link.publish(topics.chunk("lab", blob.id, k), part, retain=True)
    link.publish(topics.program("lab"), announced(package), retain=True)
    link.close()


@pytest.fixture
def package(tmp_path: Path) -> UpdatePackage:
    return an_update(tmp_path, "1.1-bbb", more={"lib/noise": bytes(np.random.default_rng(0).bytes(50_000))})


def test_a_program_is_fetched_in_chunks_and_left_for_root_whose_answer_is_told(
    tmp_path: Path, package: UpdatePackage
) -> None:
    broker = LoopbackBroker()
    publish(broker, package)
    device = Device(tmp_path / "home", broker)
    device.until(lambda: device.ready)
    assert device.updates.state.st == "installing"
    assert (device.inbox / "program.tar.gz").read_bytes() == package.archive.read_bytes()
    assert (device.inbox / "PACKAGE").read_bytes() == package.statement
    device.answer("back", "its agent did not reach its broker")
    device.until(lambda: device.updates.state.st == "back")
    assert device.updates.state.why == "its agent did not reach its broker"
    assert not (device.inbox / "program.tar.gz").exists()
    again = Device(tmp_path / "home", broker)  # a restart: it is not tried again
    again.until(lambda: again.updates.state.st == "back" and not again.link.poll(0))
    assert not again.ready


@pytest.mark.parametrize(("changed", "words"), [
    ({"signer": OTHER}, "is signed by key"),
    ({"fleet": "attic"}, "of the fleet 'attic'"),
    ({"v": 2}, "protocol 2"),
    ({"exp": 1}, "has expired"),
    ({"program": "metafleet program 1\n"}, "carries no Ed25519"),
    ({"program": OTHER.sign(b"metafleet program 1\n").decode()}, "is signed by key"),
    ({"files": {"prepare": "evil"}}, "not those that were signed"),
    ({"url": "http://example.org/x"}, "malformed"),
    ({"blob": Blob.of(b"x" * 5000, CHUNK)}, "5000 bytes are announced"),
])
def test_an_announcement_that_is_forged_or_does_not_fit_is_refused_and_told(
    tmp_path: Path, package: UpdatePackage, changed: dict[str, Any], words: str
) -> None:
    device = Device(tmp_path / "home", LoopbackBroker())
    with pytest.raises(MessageError, match=words):
        device.updates.on_announcement(announced(package, **changed))
    assert device.updates.state.st == "refused"
    assert words in device.updates.state.why
    assert device.updates.state.serial == 0


def test_an_old_announcement_is_refused_after_a_restart_too(tmp_path: Path, package: UpdatePackage) -> None:
    Device(tmp_path / "home", LoopbackBroker()).updates.on_announcement(announced(package, 10, devices=()))
    device = Device(tmp_path / "home", LoopbackBroker())
    with pytest.raises(MessageError, match="old sequence number 9"):
        device.updates.on_announcement(announced(package, 9))
    device.updates.on_announcement(announced(package, 10, devices=()))  # the broker sends it again


def test_a_program_for_another_system_is_refused_with_its_serial(tmp_path: Path) -> None:
    device = Device(tmp_path / "home", LoopbackBroker())
    device.updates.on_announcement(announced(an_update(tmp_path, "1.1-bbb", arch="riscv64")))
    state = device.updates.state
    assert state.st == "refused"
    assert state.serial > 0
    assert state.why.startswith("the program is for riscv64")
    assert system() in state.why


def test_a_device_that_is_not_named_fetches_nothing_and_one_that_runs_it_says_so(
    tmp_path: Path, package: UpdatePackage
) -> None:
    other = Device(tmp_path / "other", LoopbackBroker())
    other.updates.on_announcement(announced(package, devices=("another",)))
    assert other.updates.state.st == ""
    runs = Device(tmp_path / "runs", LoopbackBroker(), version="1.1-bbb")
    runs.updates.on_announcement(announced(package))
    assert runs.updates.state.st == "running"


def test_a_withdrawn_program_is_not_fetched_any_more_and_what_came_is_kept(
    tmp_path: Path, package: UpdatePackage
) -> None:
    broker = LoopbackBroker()
    publish(broker, package, but=(20,))
    device = Device(tmp_path / "home", broker)
    device.until(lambda: device.updates._file is not None and device.updates._file.first_missing == 20)
    device.updates.on_announcement(b"")
    assert device.updates.state.st == ""
    publish(broker, package)
    device.until(lambda: device.ready)


def test_a_wrong_chunk_is_refused_and_the_right_one_taken(tmp_path: Path, package: UpdatePackage) -> None:
    blob = Blob.of(package.archive.read_bytes(), CHUNK)
    file = PartialFile(tmp_path / "part", blob)
    assert file.look(1 << 20)
    for bad in (b"x" * CHUNK, b"short", b""):
        with pytest.raises(MessageError, match="chunk 1 "):
            file.put(1, bad)
    with pytest.raises(MessageError, match=f"chunk {blob.n} "):
        file.put(blob.n, b"x")
    assert file.put(1, cut(package.archive.read_bytes(), blob)[1])


def test_after_a_power_cut_the_chunks_that_are_right_are_not_fetched_again(
    tmp_path: Path, package: UpdatePackage
) -> None:
    data = package.archive.read_bytes()
    blob = Blob.of(data, CHUNK)
    parts = cut(data, blob)
    before = PartialFile(tmp_path / "part", blob)
    assert before.look(1 << 20)
    for k in range(0, blob.n, 2):
        before.put(k, parts[k])
    before.close()
    with (tmp_path / "part").open("r+b") as file:  # the cut tore a chunk
        file.seek(4 * CHUNK + 10)
        file.write(b"torn")
    after = PartialFile(tmp_path / "part", blob)
    assert after.look(1 << 20)
    assert [k for k in range(blob.n) if after.put(k, parts[k])] == sorted({4, *range(1, blob.n, 2)})
    after.finish(tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == data


@pytest.mark.parametrize("at", range(1, 9))
def test_a_power_cut_at_any_write_leaves_a_device_that_goes_on(
    tmp_path: Path, package: UpdatePackage, at: int
) -> None:
    broker = LoopbackBroker()
    publish(broker, package)
    with cut_at(at) as begun:
        device = Device(tmp_path / "home", broker)
        device.until(lambda: device.ready)
    assert begun[0] >= min(at, 7)
    again = Device(tmp_path / "home", broker)
    again.until(lambda: again.ready or again.clock.seconds > 1400, steps=6000)
    assert again.ready
    assert (again.inbox / "program.tar.gz").read_bytes() == package.archive.read_bytes()


# HTTPS


@contextmanager
def file_server(
    data: bytes, folder: Path, *, ranges: bool = True, cut_after: int = 0
) -> Iterator[tuple[str, list[str]]]:
    """(address, Range headers) of a file server with a certificate of its own authority, folder/authority.pem.
    cut_after: the first answer ends after that many bytes."""
    pki = user_pki(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pki.server)
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            first = int(self.headers["Range"].partition("=")[2].partition("-")[0]) if ranges else 0
            self.send_response(206 if ranges else 200)
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            end = first + cut_after if cut_after and len(asked) == 1 else len(data)
            self.wfile.write(data[first:end])

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}/program.tar.gz", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def trusting(folder: Path) -> Callable[[], ssl.SSLContext]:
    return lambda: ssl.create_default_context(cafile=str(folder / "authority.pem"))


@pytest.mark.parametrize("ranges", [True, False])
def test_from_a_plain_file_server_it_goes_on_where_the_connection_broke(
    tmp_path: Path, package: UpdatePackage, ranges: bool
) -> None:
    data = package.archive.read_bytes()
    with file_server(data, tmp_path, ranges=ranges, cut_after=10 * CHUNK + 5) as (url, asked):
        device = Device(tmp_path / "home", LoopbackBroker(), context=trusting(tmp_path))
        device.updates.on_announcement(announced(package, url=url))
        waiting.until(lambda: device.ready, device.step)
    assert (device.inbox / "program.tar.gz").read_bytes() == data
    assert asked == [f"bytes=0-{len(data) - 1}", f"bytes={10 * CHUNK}-{len(data) - 1}"]


def test_another_file_and_a_server_that_nobody_vouches_for_are_refused(
    tmp_path: Path, package: UpdatePackage
) -> None:
    data = package.archive.read_bytes()
    other = bytes(len(data))
    for served, context, words in (
        (other, trusting(tmp_path), "does not match its hash"), (data[:-50], trusting(tmp_path), "has"),
        (data, ssl.create_default_context, "CERTIFICATE_VERIFY_FAILED"),
    ):
        with file_server(served, tmp_path) as (url, _):
            device = Device(tmp_path / f"home{len(words)}", LoopbackBroker(), context=context)
            device.updates.on_announcement(announced(package, url=url))
            waiting.until(partial(_says_why, device), device.step)
            assert words in device.updates.state.why
            assert not device.ready
            device.updates.close()


def _says_why(device: Device) -> str:
    return device.updates.state.why
