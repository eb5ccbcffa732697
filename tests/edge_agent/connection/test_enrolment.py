"""A fleet over TLS as processes, from tokens to a round; no secret appears in its output or files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cloud_server.devices.devices import seconds_of
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import ConfigError
from fleet_core.data.samples import load, save
from fleet_core.protocol import certificates, enrolment_token
from tests.cloud_server.commands.test_cli import place, run
from tests.support.brokers import NEEDS_MOSQUITTO, free_port
from tests.support.cli import Run
from tests.support.pki import fleet_without_model
from tests.support.programs import (
    Programs,
    closed_rounds,
    command_of,
    descendants,
    edge_agent,
    metafleet,
    small_fleet,
)

__all__ = ["place", "run"]  # fixtures
pytestmark = NEEDS_MOSQUITTO
ROUNDS = 2


def secrets_in(folder: Path) -> dict[str, bytes]:
    """Name -> text that occurs in every encoding of the secret; no one may read it elsewhere."""
    found = {}
    for path in folder.rglob("*.key"):
        text = path.read_text()
        found[str(path.relative_to(folder))] = (text.splitlines()[1] if "BEGIN" in text else text.strip()).encode()
    for path in folder.rglob("*.token"):
        found[str(path.relative_to(folder))] = enrolment_token.load(path).private_key[60:124].encode()
    return found


def commands_of(programs: Programs) -> str:
    """The command lines of all processes that ``programs`` started."""
    pids = {pid for program in programs.started for pid in (program.process.pid, *descendants(program.process.pid))}
    return "".join(command_of(pid) for pid in pids)


@pytest.mark.slow
def test_two_devices_enrol_by_token_train_and_answer_over_tls_and_no_secret_leaks(run: Run, programs: Programs) -> None:
    fleet, ports = small_fleet(programs.folder / "fleet", rounds=ROUNDS), (free_port(), free_port())
    said, seen = [], dict[str, bytes]()

    def ran(*command: object, code: int = 0) -> str:
        program, *arguments = str(command[0]).split()
        done = run(program, *arguments, *command[1:])
        said.append(done.out + done.err)
        assert done.code == code, said[-1]
        return done.out

    ran("metafleet server config", fleet.folder, "--host", "127.0.0.1", "--port", ports[0],
        "--enrolment-port", ports[1])
    server = programs.start(*metafleet("server", "start", fleet.folder, "--host", "0.0.0.0", "--quiet"))
    server.wait_for("broker: mosquitto at mqtts://")
    homes = {name: programs.folder / name for name in ("d0", "d1")}
    for name, home in homes.items():
        home.mkdir()
        save(home / "samples.npz", load(programs.folder / "all.npz").of_client(name))
    (homes["d1"] / "device.toml").write_text("[train]\nenabled = false\n")

    by_file = programs.folder / "d0.token"
    made = json.loads(ran("metafleet devices enroll", fleet.folder, "d0", "--token", by_file, "--json"))
    assert set(made) == {"device", "file", "token", "expires_at", "broker"}
    ran("metafleet devices enroll", fleet.folder, "d1", "--to", homes["d1"])
    listed = json.loads(ran("metafleet devices list", fleet.folder, "--json"))
    assert [(row["name"], row["status"], row["token"] is not None) for row in listed] == [
        ("d0", "invited", True), ("d1", "invited", True)
    ]
    assert by_file.stat().st_mode & 0o077 == 0
    seen |= secrets_in(programs.folder)
    stolen = shutil.copy(by_file, programs.folder / "stolen")

    ran("edge-agent enroll", by_file, "--home", homes["d0"])
    assert not by_file.exists()
    ran("edge-agent enroll", stolen, "--home", programs.folder / "thief", code=1)
    assert "the token was used before" in said[-1]
    assert not (programs.folder / "thief" / "device.toml").exists()

    agents = [programs.start(*edge_agent("run", "--home", home)) for home in homes.values()]
    agents[1].wait_for("enrolled as d1")
    with Ledger(fleet.ledger_path) as ledger:
        server.until(lambda: {row.device for row in ledger.rows(Evaluation, round=ROUNDS)} == {"d0", "d1"})
        volumes = ledger.volume("device")
    commands = commands_of(programs)
    assert commands.count("edge_agent.commands.run") >= 2
    assert closed_rounds(fleet.folder) == [1, 2]
    for name in homes:
        volume = volumes[name]
        assert volume.mqtt is not None
        assert 0 < volume.payload.down < volume.mqtt.down
        if volume.wire is not None:  # Linux
            assert volume.mqtt.up < volume.wire.up
            assert volume.mqtt.down < volume.wire.down

    ran("metafleet predict", fleet.folder, "d1", programs.folder / "all.npz", "--json")
    for verb in ("list", "show d0", "show d1"):
        command, *rest = verb.split()
        ran(f"metafleet devices {command}", fleet.folder, *rest, "--json")
        ran(f"metafleet devices {command}", fleet.folder, *rest)
    ran("metafleet report", fleet.folder, "--out", programs.folder / "report.html")
    ran("edge-agent status", "--home", homes["d0"], "--json")
    left = json.loads(ran("metafleet devices revoke", fleet.folder, "d1", "--json"))
    assert len(left["certificates"]) == 1
    server.wait_for("d1 revoked")
    ran("metafleet predict", fleet.folder, "d1", programs.folder / "all.npz", "--timeout-s", "1", code=2)
    assert "device 'd1' was revoked" in said[-1]
    commands += commands_of(programs)
    seen |= secrets_in(programs.folder)
    assert len(seen) >= 10
    assert_untold(programs, seen, [text.encode() for text in (*said, commands)])


def assert_untold(programs: Programs, secrets: dict[str, bytes], said: list[bytes]) -> None:
    """No secret is in the output, nor in any file but its own."""
    texts = {f"output {n}": text for n, text in enumerate(said)}
    for path in (path for path in programs.folder.rglob("*") if path.is_file()):
        if path.suffix not in (".key", ".token") and path.name != "stolen":
            texts[str(path.relative_to(programs.folder))] = path.read_bytes()
    assert {"report.html", "fleet/ledger.sqlite", "fleet/mosquitto/broker.log", "program-0.log"} <= texts.keys()
    for where, text in texts.items():
        assert b"PRIVATE KEY" not in text, where
        for name, secret in secrets.items():
            assert secret not in text, f"{name} is in {where}"


def test_a_device_without_an_answer_keeps_its_token(run: Run, tmp_path: Path) -> None:
    fleet, url = fleet_without_model(tmp_path / "fleet").folder, f"mqtts://127.0.0.1:{free_port()}"
    assert run("metafleet", "devices", "enroll", fleet, "d0", "--to", tmp_path / "d0", "--broker", url).code == 0
    ran = run("edge-agent", "run", "--home", tmp_path / "d0", "--connect-s", "0.5")
    assert (ran.code, "not enrolled within 0.5 s: no broker answered" in ran.err) == (1, True), ran.err
    assert enrolment_token.load(tmp_path / "d0" / enrolment_token.FILE).device == "d0"
    assert not (tmp_path / "d0" / "device.toml").exists()
    assert [path.name for path in tmp_path.glob("d0/.enrol-*")] == []


def test_a_fleet_that_was_made_without_certificates_gets_them(run: Run, place: Path) -> None:
    fleet, file = place / "fleet", place / "d7.token"
    for path in (*fleet.glob("*.pem"), *(p for p in fleet.glob("*.key") if p.name != "fleet.key")):
        path.unlink()
    shutil.rmtree(fleet / "mosquitto")
    enroll = ("metafleet", "devices", "enroll", fleet, "d7", "--token", file)
    ran = run(*enroll)
    assert (ran.code, "hint: metafleet init" in ran.err) == (2, True), ran.err
    assert run("metafleet", "init", fleet, "--no-train-graph").code == 0
    assert run(*enroll).code == 0
    made = enrolment_token.load(file)
    assert made.fleet_key == Fleet.load(fleet).public_key()
    assert certificates.pem("CERTIFICATE", made.authority) == (fleet / "ca.pem").read_bytes()
    again = run(*enroll)
    assert (again.code, "is there already" in again.err) == (2, True)
    assert (fleet / "mosquitto" / "mosquitto.conf").exists()


@pytest.mark.parametrize("valid", ["0h", "1y", "-3h", "400d", "h", "", "3 h"])
def test_an_invalid_time_is_refused(valid: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        seconds_of(valid)
    assert [seconds_of(text) for text in ("30m", "24h", "7d")] == [1800, 86_400, 604_800]
