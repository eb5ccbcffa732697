"""``metafleet console`` as a process: its address, live events, TLS, and its end while pages are open."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.console.made_fleet import MadeFleet
from cloud_server.identity import audit_log
from cloud_server.identity.certificate_authority import Authority
from tests.support.pki import credentials_for, fleet_without_model, user_pki
from tests.support.programs import Programs, metafleet, run_to_end
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def address(programs: Programs, *arguments: object) -> str:
    """The URL of a console that was started with ``arguments``."""
    program = programs.start(*metafleet("console", *arguments, "--port", 0))
    program.wait_for("Ctrl-C ends the console")
    return next(line for line in program.text().splitlines() if line.startswith("http"))


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def test_a_round_reaches_an_open_page_and_a_signal_ends_the_console(programs: Programs, tmp_path: Path) -> None:
    fleet = MadeFleet(tmp_path / "fleet", devices=5, closed=1, rounds=9)
    url = address(programs, fleet.folder)
    with httpx2.stream("GET", f"{url}events", timeout=PATIENCE_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = events(answer.iter_lines())
        first = next(told)
        assert first["all"]
        assert "r/2" not in first["set"]
        fleet.play()
        assert any("r/2" in event["set"] and not event["all"] for event in told)
        programs.started[0].process.terminate()
        assert programs.started[0].exit_code() == 0
        assert list(told) == []


def test_beyond_loopback_it_wants_a_certificate_and_asks_for_its_token(programs: Programs, tmp_path: Path) -> None:
    fleet = MadeFleet(tmp_path / "fleet", devices=2, closed=1, rounds=9)
    refused = run_to_end(metafleet("console", fleet.folder, "--host", "0.0.0.0"))
    assert refused.returncode == 2
    assert "plain HTTP beyond this machine" in refused.stderr
    pki = user_pki(tmp_path, ["127.0.0.1"])
    certificate, key = pki.server
    url = address(programs, fleet.folder, "--host", "0.0.0.0", "--certificate", certificate, "--key", key)
    token = (fleet.folder / "console.token").read_text().strip()
    assert url.startswith("https://")
    assert url.endswith(f"/#token={token}")
    here = f"https://127.0.0.1:{httpx2.URL(url).port}"
    trust = ssl.create_default_context(cafile=str(pki.ca))
    trust.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13 sets it; the user's certificates lack key identifiers
    with httpx2.Client(base_url=here, verify=trust, headers={"origin": here}, timeout=PATIENCE_S) as client:
        assert client.get("/rounds/1").status_code == 401
        assert "Secure" in client.post("/login", json={"token": token}).headers["set-cookie"]
        assert client.get("/rounds/1").status_code == 200
        printed = httpx2.URL(url).netloc.decode()
        assert client.get("/rounds/1", headers={"host": printed}).status_code == 200, "the printed name is accepted"


def test_an_operators_certificate_opens_it_and_no_other(programs: Programs, tmp_path: Path) -> None:
    fleet = fleet_without_model(tmp_path / "fleet")
    pki = user_pki(tmp_path, ["127.0.0.1"])
    certificate, key = pki.server
    url = address(programs, fleet.folder, "--host", "0.0.0.0", "--certificate", certificate, "--key", key)
    here = f"https://127.0.0.1:{httpx2.URL(url).port}"
    operator = fleet.folder / "operators" / "operator-0"
    stranger = Authority.create(tmp_path / "other.key", tmp_path / "other.pem", "other")

    def client(shown: tuple[Path, Path] | None) -> httpx2.Client:
        trust = ssl.create_default_context(cafile=str(pki.ca))
        trust.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the user's own authority has no key identifiers
        if shown is not None:
            trust.load_cert_chain(*shown)
        return httpx2.Client(base_url=here, verify=trust, headers={"origin": here}, timeout=PATIENCE_S)

    with client((operator.with_suffix(".pem"), operator.with_suffix(".key"))) as opened:
        assert opened.get("/session").json() == {"open": True}
        assert opened.post("/actions/pause", json={}).status_code == 200
        assert opened.post("/actions/resume", json={}, headers={"origin": "https://elsewhere"}).status_code == 403
    assert audit_log.read(fleet.folder)[-1]["by"] == ".operator-0 at 127.0.0.1"
    with client(None) as opened:
        assert opened.get("/session").json() == {"open": False}
        assert opened.get("/rounds/1").status_code == 401
    device = credentials_for(fleet, "attic-01", tmp_path / "device")
    token = {"authorization": f"Bearer {(fleet.folder / 'console.token').read_text().strip()}"}
    with client((device.cert, device.key)) as opened:
        for headers in ({}, token):
            refused = opened.get("/rounds/1", headers=headers)
            assert refused.status_code == 403
            assert "the certificate of 'attic-01' is not an operator's" in refused.json()["error"]
    other = credentials_for(fleet, ".operator-0", tmp_path / "other", stranger)
    with client((other.cert, other.key)) as opened, pytest.raises(httpx2.TransportError):
        opened.get("/session")


def test_a_taken_port_and_a_folder_without_a_fleet_say_so(programs: Programs, tmp_path: Path) -> None:
    fleet = MadeFleet(tmp_path / "fleet", devices=2, closed=1, rounds=9)
    port = httpx2.URL(address(programs, fleet.folder)).port
    taken = run_to_end(metafleet("console", fleet.folder, "--port", port))
    assert taken.returncode == 1
    assert "choose another --port" in taken.stderr
    nothing = run_to_end(metafleet("console", tmp_path))
    assert nothing.returncode == 2
    assert "there is no fleet here" in nothing.stderr


def test_the_aggregator_starts_it_and_goes_on_without_it(programs: Programs, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "fleet", tmp_path / "fleet"))
    start = (*metafleet("server", "start", folder, "--broker", "embedded", "--port", 0, "--quiet", "--console"),
             "--console-port")
    server = programs.start(*start, "0")
    server.wait_for("console: http://")
    server.wait_for("broker: ")
    url = next(line for line in server.text().splitlines() if line.startswith("console: ")).removeprefix("console: ")
    with httpx2.stream("GET", f"{url}events", timeout=PATIENCE_S) as answer:
        told = events(answer.iter_lines())
        assert any(event["set"].get("fleet", {}).get("running") for event in told)
        server.process.terminate()
        assert server.exit_code() == 0
        assert not any(event["all"] for event in told), "the stream ends; a last change may come before"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        again = programs.start(*start, str(taken.getsockname()[1]))
        again.wait_for("no console: error: ")
        again.wait_for("broker: ")
        again.process.terminate()
        assert again.exit_code() == 0
