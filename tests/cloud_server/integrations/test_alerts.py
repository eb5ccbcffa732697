"""Alerts: what needs a person is found, told once, and sent by each channel; a channel that fails stops nothing."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.console.made_fleet import MadeFleet
from cloud_server.commands.cli import app
from cloud_server.integrations import alert_senders, alerts
from cloud_server.integrations.alert_senders import Sender, channels, watch
from cloud_server.integrations.alerts import DAY_S, Alerts, present
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate, Device, Evaluation, Round, Update
from cloud_server.records import update_record
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import AlertsSection
from cloud_server.running import aggregator_process
from fleet_core.base.errors import ConfigError, LinkError
from tests.support import waiting

NOW = 1_800_000_000.0
QUIET = AlertsSection(disk_mib=0)


@pytest.fixture
def running(fleet: Fleet) -> Iterator[None]:
    with fleet.lock():
        yield


def kinds(fleet: Fleet, ledger: Ledger, section: AlertsSection = QUIET) -> dict[str, Any]:
    return {alert.kind: alert for alert in present(fleet, ledger, section, NOW)}


def device(name: str, **more: Any) -> Device:
    return Device(name=name, took_part=True, **{"state": "off", "last_seen": NOW, **more})


def update(number: int, name: str, status: str, reason: str = "") -> Update:
    return Update(round=number, device=name, update_id=f"{number:032x}", received_at=NOW, status=status, reason=reason)


def evaluation(number: int, name: str, accuracy: float, **more: Any) -> Evaluation:
    return Evaluation(round=number, device=name, stage="after", method="proto", confusion=(), accuracy=accuracy,
                      macro_f1=accuracy, **more)


def test_a_fleet_without_an_aggregator_is_told(fleet: Fleet, ledger: Ledger) -> None:
    assert set(kinds(fleet, ledger)) == {"aggregator"}
    with fleet.lock():
        assert kinds(fleet, ledger) == {}


@pytest.mark.usefixtures("running")
def test_each_kind_is_found_and_no_other(fleet: Fleet, ledger: Ledger) -> None:
    ledger.set_facts(stalled="waiting for the disk")
    assert "waiting for the disk" in kinds(fleet, ledger)["stalled"].text
    ledger.set_facts(stalled="")
    assert set(kinds(fleet, ledger, AlertsSection(disk_mib=1e9))) == {"disk"}
    ledger.put(device("d0", last_seen=NOW - 901), device("d1", last_seen=NOW - 899), device("d2", state="on"),
               device("d3", last_seen=0.0, status="revoked"), replace(device("d4", last_seen=0.0), took_part=False))
    assert kinds(fleet, ledger)["lost"].devices == ("d0",)
    ledger.put(*(Round(round=number, opened_at=NOW) for number in (1, 2)), device("d1"))
    ledger.put(device("d0"), update(1, "d0", "refused", "norm"), update(2, "d0", "counted"), update(1, "d1", "counted"),
               update(2, "d1", "refused", "an update of norm 900"), update(2, "d3", "refused"))
    refused = kinds(fleet, ledger)
    assert refused["refused"].devices == ("d1",)
    assert "an update of norm 900" in refused["refused"].text
    assert set(refused) == {"refused"}
    ledger.put(Round(round=3, opened_at=NOW), update(3, "d1", "counted"))
    ledger.put(device("d5", state="on", capabilities={"moved": 40}),
               device("d6", state="on", capabilities={"moved": 3}, status="revoked"))
    found = kinds(fleet, ledger)
    assert {kind: alert.devices for kind, alert in found.items()} == {"drift": ("d5",)}


@pytest.mark.usefixtures("running")
def test_a_halted_update_is_told_with_the_devices_that_failed(fleet: Fleet, ledger: Ledger) -> None:
    update = update_record.begun(update_record.Plan(1, "0.2.0", "aarch64 3.13", ("d0", "d1"), (1,)))
    update_record.write(fleet.folder, update)
    assert kinds(fleet, ledger) == {}, "it is under way"
    halted = replace(update.moved("d0", update_record.FAILED, "no room"), st=update_record.HALTED, why="1 failed")
    update_record.write(fleet.folder, halted)
    found = kinds(fleet, ledger)
    assert {kind: alert.devices for kind, alert in found.items()} == {"update": ("d0",)}
    assert found["update"].text == "the update to 0.2.0 is halted: 1 failed"


@pytest.mark.usefixtures("running")
def test_a_certificate_near_its_end_is_told_and_a_renewed_or_revoked_one_is_not(fleet: Fleet, ledger: Ledger) -> None:
    def certificate(serial: str, name: str, days: float, **more: Any) -> Certificate:
        return Certificate(serial=serial, device=name, token="", public="", certificate="", issued_at=0.0,
                           expires_at=NOW + days * DAY_S, **more)

    ledger.put(*(device(f"d{n}") for n in range(3)), certificate("1", "d0", 3), certificate("2", "d0", 60),
               certificate("3", "d1", 3), certificate("4", "d2", 3, revoked_at=NOW))
    assert kinds(fleet, ledger)["certificate"].devices == ("d1",)
    far = replace(QUIET, certificate_days=36_500)
    assert "ca.pem" in kinds(fleet, ledger, far)["certificate"].text


@pytest.mark.usefixtures("running")
def test_falling_accuracy_is_that_of_the_same_devices(fleet: Fleet, ledger: Ledger) -> None:
    ledger.put(*(Round(round=number, opened_at=NOW) for number in (10, 20, 30)), *(device(f"d{n}") for n in range(4)))
    ledger.put(evaluation(10, "d0", 0.9), evaluation(10, "d1", 0.9), evaluation(20, "d0", 0.88))
    assert kinds(fleet, ledger) == {}, "within the margin"
    ledger.put(evaluation(20, "d2", 0.1), evaluation(20, "d3", 0.0, new=True))
    assert kinds(fleet, ledger) == {}, "d2 was not evaluated before, and d3 is new"
    ledger.put(evaluation(30, "d0", 0.7), evaluation(30, "d1", 0.8))
    assert kinds(fleet, ledger)["accuracy"].text == "the devices' accuracy is 15.0 points below that of round 10"
    ledger.put(Round(round=40, opened_at=NOW), evaluation(40, "d3", 0.0, new=True))
    assert "accuracy" in kinds(fleet, ledger), "a new device that is evaluated first does not end it"


@pytest.mark.usefixtures("running")
def test_an_alert_is_told_once_again_later_for_others_and_at_its_end(fleet: Fleet, ledger: Ledger) -> None:
    section = replace(QUIET, pause_s=100, repeat_s=1000)

    def told(at: float) -> list[tuple[str, str, list[str]]]:
        """What a new ``Alerts`` sends, as after a restart."""
        messages = Alerts(fleet, section).look(ledger, NOW + at)
        return [(message["kind"], message["state"], message["devices"]) for message in messages]

    ledger.put(device("d0", last_seen=0.0))
    assert told(0) == [("lost", "alert", ["d0"])]
    assert told(1) == []
    ledger.put(device("d1", last_seen=0.0))
    assert told(50) == [], "within the pause"
    assert told(101) == [("lost", "alert", ["d0", "d1"])]
    assert told(1100) == []
    assert told(1102) == [("lost", "alert", ["d0", "d1"])], "it lasts"
    for name in ("d0", "d1"):
        ledger.put(device(name, state="on"))
    assert told(1103) == []
    assert told(1203) == [("lost", "over", ["d0", "d1"])]
    ledger.put(device("d0", last_seen=0.0))
    assert told(1204) == [], "a device that comes and goes is not told each time"
    assert told(1304) == [("lost", "alert", ["d0"])]
    (fleet.folder / alerts.FILE).write_text("{")
    assert told(1305) == [("lost", "alert", ["d0"])], "a damaged file costs a repetition"


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """(address, what was posted, the status of the next answers)."""
    posted: list[dict[str, Any]] = []
    answers: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", posted, answers
        server.shutdown()
        thread.join()


def keeping(path: Path) -> tuple[str, ...]:
    """A command that adds its standard input to a file."""
    return (sys.executable, "-c", f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + '\\n')")


def test_a_message_goes_to_the_command_and_the_webhook(
    hook: tuple[str, list[dict[str, Any]], list[int]], tmp_path: Path
) -> None:
    url, posted, answers = hook
    answers.append(500)
    said: list[str] = []
    message = {"kind": "lost", "text": "plant: d0 is off"}
    send = Sender(AlertsSection(command=keeping(tmp_path / "kept"), webhook=url), said.append, between_s=0.0)
    send(message)
    send.close(waiting.PATIENCE_S)
    assert json.loads((tmp_path / "kept").read_text()) == message, "once, although the webhook failed first"
    assert posted == [message, message]
    assert said == []


def test_what_cannot_be_sent_is_said_and_the_webhooks_address_is_not(tmp_path: Path) -> None:
    said: list[str] = []
    failing = (sys.executable, "-c", "import sys; sys.exit('no pager here')")
    send = Sender(AlertsSection(command=failing, webhook="http://127.0.0.1:1/secret"), said.append, between_s=0.0)
    send({"text": "plant: d0 is off"})
    send.close(waiting.PATIENCE_S)
    assert len(said) == 2
    assert "exit code 1: no pager here" in said[0]
    assert "secret" not in said[1]
    missing = AlertsSection(command=(str(tmp_path / "missing"),))
    assert next(channel({"text": ""}) for channel in channels(missing)).startswith(f"{tmp_path / 'missing'}: ")


def test_a_watch_tells_while_no_aggregator_runs(fleet: Fleet, tmp_path: Path) -> None:
    kept, said, looks = tmp_path / "kept", list[str](), iter([False, False, True])
    section = replace(QUIET, command=keeping(kept))
    with fleet.lock():
        watch(fleet, section, lambda: next(looks), said.append, look_s=0.0)
    assert said == []
    looks = iter([False, False, True])
    watch(fleet, section, lambda: next(looks), said.append, look_s=0.0)
    assert said == ["alert: t: no aggregator runs: metafleet server start"]
    waiting.until(kept.exists)


def test_an_aggregator_publishes_an_alert_when_the_broker_takes_it_and_clears_it_when_it_is_over(
    fleet: Fleet, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_senders, "watch", partial(watch, look_s=0.0))
    section = AlertsSection(mqtt=True, disk_mib=0, pause_s=0)
    asked = replace(fleet, config=replace(fleet.config, alerts=section))
    published, said, away = list[tuple[str, bytes]](), list[str](), [True]

    def publish(topic: str, payload: bytes, *, retain: bool) -> None:
        if away[0]:
            raise LinkError("is not connected")
        assert retain
        published.append((topic, payload))

    aggregator: Any = SimpleNamespace(coordinator=SimpleNamespace(link=SimpleNamespace(publish=publish)))
    with fleet.lock(), aggregator_process._alerting(asked, aggregator, said.append) as tell:
        ledger.put(device("d0", last_seen=0.0))
        waiting.until(lambda: said, tell)
        assert published == []
        away[0] = False
        waiting.until(lambda: published, tell)
        ledger.put(device("d0", state="on"))
        waiting.until(lambda: len(published) == 2, tell)
    assert [topic for topic, _ in published] == ["fl1/t/alert/lost"] * 2
    assert json.loads(published[0][1])["devices"] == ["d0"]
    assert published[1][1] == b""
    assert said == [f"alert: t: {over}1 device off for more than 900 s: d0" for over in ("", "over: ")]


def test_the_command_lists_alerts_and_sends_a_test(tmp_path: Path) -> None:
    fleet = MadeFleet(tmp_path / "fleet", devices=3, closed=1, rounds=9)
    found = CliRunner().invoke(app, ["server", "alerts", str(fleet.folder), "--json"])
    assert json.loads(found.stdout)[0]["kind"] == "aggregator"
    nobody = CliRunner().invoke(app, ["server", "alerts", str(fleet.folder), "--test"])
    assert isinstance(nobody.exception, ConfigError)
    settings = fleet.folder / "fleet.toml"
    kept = tmp_path / "kept"
    settings.write_text(f"{settings.read_text()}\n[alerts]\ncommand = {json.dumps(keeping(kept))}\n")
    assert CliRunner().invoke(app, ["server", "alerts", str(fleet.folder), "--test"]).exit_code == 0
    assert json.loads(kept.read_text())["kind"] == "test"


@pytest.mark.parametrize("url", ["ftp://example.org", "http://example.org/hook", "https://", "file:///etc/passwd"])
def test_an_address_that_takes_no_alerts_is_refused(fleet: Fleet, url: str) -> None:
    path = fleet.folder / "fleet.toml"
    path.write_text(f'{path.read_text()}\n[alerts]\nwebhook = "{url}"\n')
    with pytest.raises(ConfigError, match=r"alerts\.webhook"):
        Fleet.load(fleet.folder)
