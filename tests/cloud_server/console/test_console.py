"""The console's server: what it reads, who may use it, what it asks for, and its limits."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from benchmarks.console.made_fleet import MadeFleet
from cloud_server.console import actions, live, round_words, serve
from cloud_server.console.app import LARGE, SMALL, app
from cloud_server.console.fleet_view import FleetView
from cloud_server.console.live import Live
from cloud_server.console.serve import Address
from cloud_server.devices import flash_in_waves, flash_over_ssh, predict
from cloud_server.devices.flash_in_waves import WaveFlash
from cloud_server.identity import audit_log
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round, Update
from cloud_server.records import update_record
from firmware_profiles.ssh import side_by_side
from firmware_profiles.ssh.inventory import Entry
from firmware_profiles.ssh.remote_install import Outcome, Tell
from fleet_core.base.errors import ConfigError, FlashError, LinkError, StateError
from fleet_core.protocol import enrolment_token
from fleet_core.protocol.device_messages import Answer
from tests.support.waiting import PATIENCE_S, until

HERE = "http://localhost"
ORIGIN = {"origin": HERE}
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeFleet:
    return MadeFleet(tmp_path_factory.mktemp("made") / "fleet", devices=40, closed=6, rounds=9)


@pytest.fixture
def folder(made: MadeFleet, tmp_path: Path) -> Path:
    """A copy of the generated fleet."""
    to = tmp_path / "fleet"
    to.mkdir()
    shutil.copy(made.folder / "fleet.toml", to)
    made.ledger.copy(to / "ledger.sqlite")
    return to


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(app(folder, Live(folder)), base_url=HERE) as opened:
        yield opened


def read(folder: Path) -> dict[str, Any]:
    view = FleetView(folder)
    try:
        return json.loads(json.dumps(view.read()))
    finally:
        view.close()


# What is read ---------------------------------------------------------------------------------------------------------


def test_a_fleet_is_read_with_its_devices_rounds_and_events(folder: Path) -> None:
    values = read(folder)
    fleet = values["fleet"]
    assert (fleet["fleet"], fleet["rounds_closed"], fleet["rounds"], fleet["running"]) == ("greenhouse", 6, 9, False)
    assert fleet["limits"]["target_accuracy"] == 0.9
    assert fleet["used"]["bytes"] == sum(fleet["totals"]["wire_bytes"][way] for way in ("up", "down"))
    assert sum(key.startswith("d/") for key in values) == 40
    assert values["d/attic-01"]["payload"][0] > 0
    assert (values["d/attic-01"]["board"], values["d/attic-01"]["engine"]) == ("Raspberry Pi Zero 2 W Rev 1.0", "onnx")
    assert "board" not in values["d/garden-01"]
    last = values["r/6"]
    assert last["asked"] == 40
    assert last["counted"] + last["refused"] <= 40
    assert last["accuracy"]["worst"] <= last["accuracy"]["mean"]
    assert "accuracy" not in values["r/5"]
    assert any(value["text"].startswith("round 6 closed") for key, value in values.items() if key.startswith("l/"))


def test_what_was_not_measured_is_absent(folder: Path) -> None:
    values = read(folder)
    unmetered = [value for key, value in values.items() if key.startswith("d/") and "joules" not in value]
    assert 0 < len(unmetered) < 40
    assert not any(value is None for one in values.values() for value in one.values())


def test_a_fleet_that_trained_is_read_as_its_result_says(finished: Path) -> None:
    values = read(finished / "fleet")
    trains, answers = values["d/d0"], values["d/d1"]
    assert trains["counted"] == 2
    assert answers["new"]
    assert "after" in answers
    assert values["r/2"]["status"] == "closed"


def test_a_later_read_finds_what_came_since(folder: Path) -> None:
    view = FleetView(folder)
    before = view.read()
    with Ledger(folder / "ledger.sqlite") as ledger:
        seen = view.ledger.data_version()
        ledger.put(Round(round=7, opened_at=1e9, cohort=("attic-01", "barn-01"), status="open"),
                   Update(round=7, device="attic-01", update_id="u", received_at=1e9 + 1, status="refused",
                          reason="odd"))
    assert view.ledger.data_version() != seen
    after = view.read()
    view.close()
    assert "r/7" not in before
    assert (after["r/7"]["asked"], after["r/7"]["refused"]) == (2, 1)
    assert after["d/attic-01"]["trouble"] == {"round": 7, "text": "odd", "what": "refused"}
    assert after["r/6"] == before["r/6"]


def test_a_round_is_explained_in_words(made: MadeFleet) -> None:
    found = round_words.explained(made.ledger, 6)
    text = " ".join(found["sentences"])
    became = [one["status"] for one in found["devices"]]
    counted = became.count("counted")
    assert "asked 40 devices of 40 enrolled" in text
    assert f"{counted} devices were counted: " in text
    assert ("refused" in became) == ("was refused: the norm 12000 is above 10000" in text)
    assert ("silent" in became) == ("Nothing came from" in text)
    assert "Updates came back as int8, as fleet.toml says." in text
    assert "in the round before" in text
    assert len(found["devices"]) == 40


def test_an_open_round_says_who_is_awaited(folder: Path) -> None:
    with Ledger(folder / "ledger.sqlite") as ledger:
        ledger.put(Round(round=7, opened_at=1e9, cohort=("attic-01", "barn-01"), status="open"))
        ledger.put(Round(round=8, opened_at=1e9, cohort=("attic-01",), status="closed"))
        found = round_words.explained(ledger, 7)
        closed = round_words.explained(ledger, 8)
    text = " ".join(found["sentences"])
    assert "It is still open." in text
    assert "Nothing has come yet from attic-01, barn-01." in text
    assert found["devices"] == [{"device": name, "status": "awaited"} for name in ("attic-01", "barn-01")]
    assert closed["devices"] == [{"device": "attic-01", "status": "silent"}]


def test_a_device_is_shown_with_its_history(client: TestClient) -> None:
    found = client.get("/devices/attic-01").json()
    assert [row["round"] for row in found["evaluations"]] == [3, 6]
    assert found["evaluations"][-1]["after"]["method"] == "proto"
    assert len(found["evaluations"][-1]["confusion"]) == 3
    assert {"up", "down"} <= found["rounds"][0].keys()
    assert client.get("/rounds/6").json()["round"] == 6


# Who may use it -------------------------------------------------------------------------------------------------------


def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(client: TestClient) -> None:
    page = client.get("/")
    assert "page/main.js" in page.text
    assert "http://" not in page.text.replace(HERE, "")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in ("main.js", "style.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE"):
        assert client.get(f"/page/{name}").status_code == 200
    assert client.get("/page/../app.py").status_code == 404
    assert client.get("/page/%2e%2e/app.py").status_code == 404


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
                                  "evil.example:8765", "", "[::1", "localhost@evil.example"])
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/session", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1:8765", "[::1]:8765", "192.168.1.5", "hub.local:8765"])
def test_addresses_and_named_hosts_are_let_through(folder: Path, host: str) -> None:
    with TestClient(app(folder, Live(folder), names=("hub.local",)), base_url=HERE) as client:
        assert client.get("/session", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"origin": "null"}, {"origin": "http://evil.example"},
                                     {"origin": "https://localhost"}, {"origin": "http://localhost:81"}])
def test_an_action_of_another_page_is_refused(client: TestClient, folder: Path, headers: dict[str, str]) -> None:
    assert client.post("/actions/pause", json={}, headers=headers).status_code == 403
    assert audit_log.read(folder) == []


def test_with_a_token_nothing_is_read_without_it(folder: Path) -> None:
    with TestClient(app(folder, Live(folder), TOKEN), base_url=HERE) as client:
        for path in ("/events", "/rounds/6", "/devices/attic-01"):
            assert client.get(path).status_code == 401
        assert client.post("/actions/pause", json={}, headers=ORIGIN).status_code == 401
        assert client.get("/session").json() == {"open": False}
        assert client.get("/rounds/6", headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
        assert client.get("/rounds/6", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.post("/login", json={"token": "wrong"}, headers=ORIGIN).status_code == 401
        assert client.post("/login", json={"token": 3}, headers=ORIGIN).status_code == 401
        answer = client.post("/login", json={"token": TOKEN}, headers=ORIGIN)
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie
        assert client.get("/rounds/6").status_code == 200
        assert client.get("/session").json() == {"open": True}


def test_the_token_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    beyond = Address(host="0.0.0.0", plain=True)
    assert serve.token_of(tmp_path, Address()) is None
    made = serve.token_of(tmp_path, beyond)
    path = tmp_path / serve.TOKEN_FILE
    assert made == serve.token_of(tmp_path, beyond)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        serve.token_of(tmp_path, beyond)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="is not a token"):
        serve.token_of(tmp_path, Address(token_file=path))


def test_plain_http_leaves_the_machine_only_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain HTTP beyond this machine"):
        serve.check(Address(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="belong together"):
        serve.check(Address(certificate=tmp_path / "c.pem"))
    serve.check(Address(host="0.0.0.0", plain=True))
    serve.check(Address(host="::1"))


# What is asked for ----------------------------------------------------------------------------------------------------


def test_pausing_asks_the_aggregator_and_is_in_the_audit_log(client: TestClient, folder: Path) -> None:
    answer = client.post("/actions/pause", json={}, headers=ORIGIN)
    assert answer.json()["text"].startswith("paused: the aggregator is not running")
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.requests() == {"paused": "yes"}
    (entry,) = audit_log.read(folder)
    assert (entry["action"], entry["by"], entry["outcome"]) == ("pause", "testclient", "done")
    assert (folder / audit_log.FILE).stat().st_mode & 0o777 == 0o600
    lines = (folder / audit_log.FILE).read_text().splitlines()
    assert [json.loads(line).get("outcome") for line in lines] == [None, "done"]
    client.post("/actions/resume", json={}, headers=ORIGIN)
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.requests() == {"paused": "no"}
    assert any("resume" in value["text"] for key, value in read(folder).items() if key.startswith("l/"))


def test_an_update_that_devices_fetch_is_shown_and_gone_on_with(client: TestClient, folder: Path) -> None:
    refused = client.post("/actions/abort-update", json={}, headers=ORIGIN)
    assert (refused.status_code, "there is no update" in refused.json()["error"]) == (409, True)
    update = update_record.begun(update_record.Plan(1, "0.2.0", "aarch64 3.13", ("attic-01", "attic-02"), (1,)))
    halted = replace(update.moved("attic-01", update_record.FAILED, "no room"), st=update_record.HALTED, why="1 failed")
    update_record.write(folder, halted)
    shown = read(folder)["fleet"]["update"]
    assert (shown["st"], shown["why"], shown["failed"], shown["waiting"]) == ("halted", "1 failed", 1, 1)
    answer = client.post("/actions/resume-update", json={}, headers=ORIGIN)
    assert answer.json()["text"] == "0.2.0: resume requested"
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.requests()["update"].startswith("resume ")
    assert audit_log.read(folder)[-1]["action"] == "resume-update"


def test_revoking_asks_the_aggregator(client: TestClient, folder: Path) -> None:
    answer = client.post("/actions/revoke", json={"device": "attic-01"}, headers=ORIGIN)
    assert answer.json()["text"] == "attic-01 is revoked when the aggregator runs"
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert list(ledger.requests()) == ["revoke/attic-01"]
    assert read(folder)["d/attic-01"]["pending"] == "revoke"
    unknown = client.post("/actions/revoke", json={"device": "attic-1"}, headers=ORIGIN)
    assert unknown.status_code == 409
    assert "did you mean" in unknown.json()["error"]
    assert audit_log.read(folder)[-1]["outcome"] == "failed"


def test_a_token_is_written_on_the_operators_machine(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished / "fleet", tmp_path / "fleet"))
    with TestClient(app(folder, Live(folder)), base_url=HERE) as client:
        answer = client.post("/actions/token", json={"device": "d9", "hours": 2}, headers=ORIGIN)
        assert answer.status_code == 200, answer.text
        (path,) = (folder / actions.TOKENS).glob("d9-*.token")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.name in answer.json()["text"]
        assert enrolment_token.load(path).private_key not in answer.text
        for hours in (0, 200, "2", True, 1.5):
            wrong = client.post("/actions/token", json={"device": "d9", "hours": hours}, headers=ORIGIN)
            assert wrong.status_code == 409
    assert read(folder)["d/d9"]["status"] == "invited"


@pytest.mark.parametrize(("action", "given"), [("reboot", {}), ("revoke", {}), ("revoke", {"device": 3}),
                                               ("revoke", {"device": "../x"}), ("token", {"device": "a b"})])
def test_what_is_no_action_is_refused(client: TestClient, folder: Path, action: str, given: dict[str, Any]) -> None:
    assert client.post(f"/actions/{action}", json=given, headers=ORIGIN).status_code == 409
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.requests() == {}


def test_nothing_is_done_that_cannot_be_written_to_the_audit_log(client: TestClient, folder: Path) -> None:
    (folder / audit_log.FILE).mkdir()
    assert client.post("/actions/pause", json={}, headers=ORIGIN).status_code == 409
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.requests() == {}


def test_a_torn_line_of_the_audit_log_spoils_no_other(tmp_path: Path) -> None:
    with audit_log.recorded(tmp_path, "me", "pause"):
        pass
    path = tmp_path / audit_log.FILE
    path.write_bytes(path.read_bytes() + b'{"id": "half')
    with pytest.raises(StateError), audit_log.recorded(tmp_path, "me", "revoke", "d1"):
        raise StateError("no disk")
    entries = audit_log.read(tmp_path)
    assert [(one["action"], one["outcome"]) for one in entries] == [("pause", "done"), ("revoke", "failed")]
    assert audit_log.sentence(entries[1]) == "revoke d1 failed: no disk (console, me)"


# Flashing in waves ----------------------------------------------------------------------------------------------------


@pytest.fixture
def flashed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three devices in the inventory, of which ``fails`` fail; ``began`` has those that began, ``go`` lets them end."""
    for k, name in enumerate(("attic", "barn", "cellar")):
        (folder / f"{name}.toml").write_text("")
        with open(folder / "inventory.toml", "a", encoding="utf-8") as file:
            file.write(f'[[devices]]\nfile = "{name}.toml"\nto = "ssh://pi@10.0.0.{k}"\n')
    seen: dict[str, Any] = {"fails": set(), "began": [], "go": threading.Event()}

    def work(entry: Entry, tell: Tell) -> Outcome:
        seen["began"].append(entry.name)
        tell("uploading", "1 of 2 MB")
        assert seen["go"].wait(PATIENCE_S)
        tell("waiting", "")
        if entry.name in seen["fails"]:
            raise FlashError("no connection", where=entry.to)
        return Outcome(entry.name, "1.1", "1.0", True)

    def instead(entries: Any, choices: Any, jobs: int, waves: Any, *, show: Any, stop: Any) -> Any:
        return side_by_side.flash_all(entries, work, show, jobs, waves, stop)

    monkeypatch.setattr(flash_over_ssh, "flashed", instead)
    monkeypatch.setattr(flash_in_waves, "_missing", lambda: iter(()))
    return seen


def ended(waves: WaveFlash) -> dict[str, Any]:
    until(lambda: not waves.going)
    return waves.values()


def test_waves_are_flashed_one_after_the_other_and_are_in_the_audit_log(
    folder: Path, flashed: dict[str, Any]
) -> None:
    waves = WaveFlash(folder)
    assert waves.offer()["devices"] == ["attic", "barn", "cellar"]
    assert waves.values() == {}
    text = actions.flash(folder, waves, {"waves": "1,2", "most_failures": 0}, "me")
    assert text == "wave 1 of 2 begins: attic"
    assert [(one["action"], one.get("outcome")) for one in audit_log.read(folder)] == [("flash", None)]
    until(lambda: waves.values()["w/0"]["stage"] == "uploading")
    assert waves.values()["w/0"] == {"name": "attic", "wave": 1, "state": "going", "stage": "uploading",
                                     "far": "1 of 2 MB"}
    assert waves.values()["w/2"]["state"] == "waiting"
    with pytest.raises(StateError, match="already"):
        actions.flash(folder, waves, {"waves": "1"}, "me")
    flashed["go"].set()
    found = ended(waves)
    assert (found["flash"]["outcome"], found["flash"]["text"]) == ("done", "3 of 3 devices run it")
    assert [found[f"w/{n}"]["wave"] for n in range(3)] == [1, 2, 2]
    assert audit_log.read(folder)[-1]["text"] == "3 of 3 devices run it"


def test_a_halt_says_why_and_which_devices_were_not_begun(folder: Path, flashed: dict[str, Any]) -> None:
    flashed["fails"].add("attic")
    flashed["go"].set()
    waves = WaveFlash(folder)
    actions.flash(folder, waves, {"waves": "1"}, "me")
    found = ended(waves)
    assert flashed["began"] == ["attic"]
    assert found["flash"]["text"] == ("0 of 3 devices run it; 1 failed: attic: ssh://pi@10.0.0.0: no connection; "
                                      "halted, because more than 0 had failed: 2 were not begun")
    assert found["w/1"]["stage"] == "not begun: 1 failed in the waves before"
    assert audit_log.read(folder)[-1]["outcome"] == "failed"
    actions.flash(folder, waves, {"waves": "1", "most_failures": 1}, "me")
    assert ended(waves)["flash"]["text"] == "2 of 3 devices run it; 1 failed: attic: ssh://pi@10.0.0.0: no connection"


def test_stopping_begins_no_further_device(folder: Path, flashed: dict[str, Any]) -> None:
    waves = WaveFlash(folder)
    with pytest.raises(StateError, match="no device is being flashed"):
        actions.stop_flash(folder, waves, "me")
    actions.flash(folder, waves, {"waves": "1"}, "me")
    until(lambda: flashed["began"] == ["attic"])
    actions.stop_flash(folder, waves, "me")
    flashed["go"].set()
    found = ended(waves)
    assert "stopped: 2 were not begun" in found["flash"]["text"]
    assert "interrupted" in found["w/0"]["stage"]
    assert flashed["began"] == ["attic"]
    assert [one["action"] for one in audit_log.read(folder)] == ["stop-flash", "flash", "stop-flash"]


def test_nothing_is_flashed_that_cannot_be_written_to_the_audit_log(folder: Path, flashed: dict[str, Any]) -> None:
    (folder / audit_log.FILE).mkdir()
    waves = WaveFlash(folder)
    with pytest.raises(StateError, match="cannot be written"):
        actions.flash(folder, waves, {"waves": "1"}, "me")
    ended(waves)
    assert flashed["began"] == []


def test_what_is_missing_for_flashing_is_said(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    offer = client.get("/flash").json()
    assert offer["devices"] == []
    assert "there is no ssh on this machine" in offer["missing"][0]
    assert "'metafleet console --inventory FILE' names another" in offer["missing"][-1]
    refused = client.post("/actions/flash", json={"waves": "1"}, headers=ORIGIN)
    assert refused.status_code == 409
    assert "there is no ssh" in refused.json()["error"]


@pytest.mark.parametrize("given", [{"waves": ""}, {"waves": "0"}, {"waves": 5}, {"waves": "1;2"}, {},
                                   {"waves": "1", "most_failures": -1}, {"waves": "1", "most_failures": True},
                                   {"waves": "1", "most_failures": "2"}, {"waves": "1", "most_failures": 1e9}])
def test_what_are_no_waves_is_refused(
    client: TestClient, folder: Path, flashed: dict[str, Any], given: dict[str, Any]
) -> None:
    assert client.post("/actions/flash", json=given, headers=ORIGIN).status_code == 409
    assert audit_log.read(folder) == []
    assert flashed["began"] == []


# A question -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The samples that devices were asked about."""
    seen: list[np.ndarray] = []

    def ask(fleet: str, device: str, x: np.ndarray, url: str, **_: Any) -> Answer:
        seen.append(x)
        if device == "barn-01":
            raise LinkError("device barn-01 did not answer in 20 s", where=url)
        return Answer(labels=("frost",) * len(x), probabilities=((0.8, 0.1, 0.1),) * len(x), round=6,
                      personalization="proto")

    monkeypatch.setattr(predict, "ask", ask)
    return seen


def test_a_device_answers_to_numbers_and_to_a_file(client: TestClient, asked: list[np.ndarray]) -> None:
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    found = client.post("/devices/attic-01/answer", json={"values": x.ravel().tolist()}, headers=ORIGIN).json()
    assert found["labels"] == ["frost"]
    assert found["classes"] == ["frost", "dry", "fine"]
    file = io.BytesIO()
    np.save(file, np.stack([x, x]))
    sent = {"name": "C:\\new.npy", "file": base64.b64encode(file.getvalue()).decode()}
    assert len(client.post("/devices/attic-01/answer", json=sent, headers=ORIGIN).json()["labels"]) == 2
    np.testing.assert_array_equal(asked[0], x[None])
    np.testing.assert_array_equal(asked[1], np.stack([x, x]))
    silent = client.post("/devices/barn-01/answer", json={"values": [0.0] * 128}, headers=ORIGIN)
    assert silent.status_code == 409
    assert "did not answer" in silent.json()["error"]


@pytest.mark.parametrize("given", [
    {"values": [1.0] * 127}, {"values": []}, {"values": "1"}, {"values": ["a"] * 128}, {"values": [1e400] * 128},
    {"values": [0.0] * 128 * 65}, {"name": "x.exe", "file": "AAAA"}, {"name": "x.npy", "file": "%"},
    {"name": "x.npy", "file": "AAAA"}, {"name": "x.npy"}, {},
])  # fmt: skip
def test_what_is_no_sample_is_refused(client: TestClient, asked: list[np.ndarray], given: dict[str, Any]) -> None:
    text = json.dumps(given)
    headers = {**ORIGIN, "content-type": "application/json"}
    answer = client.post("/devices/attic-01/answer", content=text, headers=headers)
    assert answer.status_code == 409, answer.text
    assert asked == []


# Limits ---------------------------------------------------------------------------------------------------------------


def test_bodies_are_bounded_and_have_to_be_objects(client: TestClient) -> None:
    headers = {**ORIGIN, "content-type": "application/json"}
    for path, limit in (("/actions/pause", SMALL), ("/devices/attic-01/answer", LARGE)):
        assert client.post(path, content=b" " * (limit + 1), headers=headers).status_code == 413
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 4000):
        assert client.post("/actions/pause", content=content, headers=headers).status_code == 400
    plain = {**headers, "content-type": "text/plain"}
    assert client.post("/actions/pause", content=b"{}", headers=plain).status_code == 415
    assert client.get("/actions/pause").status_code == 405


@pytest.mark.parametrize(("path", "status"), [("/rounds/x", 404), ("/rounds/-1", 404), ("/rounds/99999999999", 404),
                                              ("/rounds/٣", 404), ("/rounds/77", 409), ("/devices/none", 409),
                                              ("/devices/a%20b", 409), ("/nothing", 404)])
def test_what_is_not_there_says_so(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.json()["error"]


# Live -----------------------------------------------------------------------------------------------------------------


def taken(event: str) -> tuple[str, dict[str, Any]]:
    """(id, data) of an event."""
    first, second = event.strip().splitlines()
    return first.removeprefix("id: "), json.loads(second.removeprefix("data: "))


def test_a_page_gets_everything_once_and_then_what_changed(tmp_path: Path) -> None:
    async def run() -> None:
        state = Live(tmp_path)
        state.put({"a": "1", "b": "2"})
        page = state.stream()
        at, data = taken(await anext(page))
        assert data == {"all": True, "set": {"a": 1, "b": 2}, "gone": []}
        state.put({"a": "1", "b": "2"})
        state.put({"a": "3", "b": "2"})
        state.put({"a": "4", "c": "5"})
        at, data = taken(await anext(page))
        assert data == {"all": False, "set": {"a": 4, "c": 5}, "gone": ["b"]}
        await page.aclose()
        state.put({"a": "4", "c": "6", "b": "7"})
        again = state.stream(at)
        _, data = taken(await anext(again))
        assert data == {"all": False, "set": {"c": 6, "b": 7}, "gone": []}
        for odd in ("", "x", "other:1", f"{at}9" * 9, "🦊:1"):
            _, data = taken(await anext(state.stream(odd)))
            assert data["all"]
            assert data["set"] == {"a": 4, "b": 7, "c": 6}
        state.close()
        assert [event async for event in again] == []

    asyncio.run(run())


def test_a_page_that_missed_more_than_is_kept_starts_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_GONE", 3)

    async def run() -> None:
        state = Live(tmp_path)
        state.put({str(k): "1" for k in range(5)})
        at, _ = taken(await anext(state.stream()))
        state.put({"last": "1"})
        _, data = taken(await anext(state.stream(at)))
        assert data == {"all": True, "set": {"last": 1}, "gone": []}

    asyncio.run(run())


def test_no_more_pages_than_fit_are_served(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_PAGES", 0)
    with TestClient(app(folder, Live(folder)), base_url=HERE) as client:
        assert client.get("/events").status_code == 503


def test_a_ledger_that_cannot_be_read_is_said_on_the_page(folder: Path) -> None:
    (folder / "ledger.sqlite").write_bytes(b"no ledger" * 100)

    async def run() -> None:
        state = Live(folder)
        async with state.run():
            page = state.stream()
            _, data = taken(await anext(page))
            assert "damaged" in data["set"][live.TROUBLE]
            await page.aclose()

    asyncio.run(run())
