"""A fleet at a broker that asks everybody for a name and a password, as cloud services do."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_server.devices.devices import devices_enroll
from cloud_server.identity import fleet_certificates
from cloud_server.ledger.ledger_tables import Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import aggregator_process
from edge_agent.commands import run
from fleet_core.base.errors import ConfigError, LinkError
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.link.await_broker import await_broker
from fleet_core.link.interface import Message, Will
from fleet_core.link.mqtt import MqttLink
from tests.support.brokers import NEEDS_MOSQUITTO
from tests.support.faults import Mosquitto
from tests.support.fleet_processes import tiny_fleet
from tests.support.stepped_fleet import SteppedFleet

PASSWORDS = {"aggregator": "tiefer-see-4711", "d0": "gelbe-ente-0815", "d1": "roter-hahn-2342"}
ACL = """\
user aggregator
topic readwrite fl1/t/#
pattern write fl1/t/a/%u/#
pattern read fl1/t/a/%u/dn
pattern read fl1/t/a/%u/q/#
pattern read fl1/t/r/#
pattern read fl1/t/b/#
pattern read fl1/t/srv
"""


def hashed(name: str) -> str:
    """A line of mosquitto's password_file, as mosquitto_passwd writes it: PBKDF2 with SHA-512."""
    salt = hashlib.sha256(name.encode()).digest()[:12]
    made = hashlib.pbkdf2_hmac("sha512", PASSWORDS[name].encode(), salt, 101)
    return f"{name}:$7$101${base64.b64encode(salt).decode()}${base64.b64encode(made).decode()}\n"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    folder = tmp_path / "broker"
    folder.mkdir()
    (folder / "passwords").write_text("".join(map(hashed, PASSWORDS)))
    (folder / "acl").write_text(ACL)
    made = Mosquitto(folder, f"allow_anonymous false\npassword_file {folder}/passwords\nacl_file {folder}/acl\n")
    made.start()
    yield made
    made.stop()


def secret(folder: Path, name: str) -> Path:
    path = folder / f"{name}.password"
    path.write_text(PASSWORDS[name] + "\n")
    path.chmod(0o600)
    return path


class LoggedIn(SteppedFleet):
    """Everybody connects as the product's processes do."""

    def start_server(self, url: str = "") -> None:
        server = aggregator_process._coordinator(
            self.fleet, self.ledger, self.url, self.lines.append, lambda: None, lambda: None
        )
        assert isinstance(server.link, MqttLink)
        self.server = server
        self.links.append(server.link)
        server.link.open()

    def _link(self, name: str, will: Will, url: str) -> MqttLink:
        home = self.folder / name
        self.links.append(run._link(home, settings_of(home), f"boot-{name}", plain=False))
        return self.links[-1]


def founded(folder: Path, url: str) -> Path:
    """A fleet whose devices were enrolled with a name and a password each."""
    tiny_fleet(folder, rounds=1)
    path = folder / "fleet" / "fleet.toml"
    secret(folder / "fleet", "aggregator")
    path.write_text(path.read_text() + '\n[broker_login]\nusername = "aggregator"\n'
                                       'password_file = "aggregator.password"\n')
    for name in ("d0", "d1"):
        devices_enroll(folder / "fleet", name, to=folder / name, broker=url, user=name,
                       password=secret(folder / "fleet", name), as_json=True)
    return folder


@pytest.mark.slow
@NEEDS_MOSQUITTO
def test_a_fleet_trains_at_a_broker_that_asks_for_passwords_and_shows_them_to_nobody_else(
    tmp_path: Path, broker: Mosquitto, capfd: pytest.CaptureFixture[str]
) -> None:
    fleet = LoggedIn(founded(tmp_path / "world", broker.url), broker.url)
    spy = MqttLink(broker.url, client_id="spy", username="aggregator", password=PASSWORDS["aggregator"])
    spy.subscribe("fl1/#")
    spy.open()
    passed: list[bytes] = []
    try:
        fleet.start()
        while not fleet.settled():
            fleet.step()
            passed += [event.payload for event in spy.poll(0) if isinstance(event, Message)]
        assert [row.device for row in fleet.ledger.rows(Update, round=1, status="counted")] == ["d0", "d1"]
    finally:
        spy.close()
        fleet.close()
    shown = "\n".join(fleet.lines) + "".join(capfd.readouterr())
    files = [path for path in (tmp_path / "world").rglob("*") if path.is_file() and path.suffix != ".password"]
    everything = b"".join([*passed, shown.encode(), *(path.read_bytes() for path in files)])
    assert len(passed) > 5
    for name, password in PASSWORDS.items():
        assert name.encode() in everything
        assert password.encode() not in everything


@NEEDS_MOSQUITTO
def test_a_wrong_password_is_told_without_quoting_it(tmp_path: Path, broker: Mosquitto) -> None:
    wrong = MqttLink(broker.url, client_id="d0", username="d0", password="falsche-ente")
    wrong.open()
    with pytest.raises(LinkError) as refused:
        await_broker(wrong, lambda: wrong.poll(0.02), broker.url, lambda: False, 1.0)
    wrong.close()
    assert "falsche-ente" not in str(refused.value)


@pytest.mark.slow
def test_enrolling_with_a_password_writes_a_home_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = founded(tmp_path, "mqtts://broker.example.org:8883")
    home = folder / "d0"
    settings: Settings = settings_of(home)
    assert (settings.broker_login.username, settings.broker_login.password_file) == ("d0", "broker.password")
    assert (home / "broker.password").stat().st_mode & 0o077 == 0
    assert (settings.tls.ca, settings.tls.certificate) == ("ca.pem", None), "no certificate, and the fleet's authority"
    assert not list(home.glob("*.token"))
    other = secret(tmp_path, "d1")
    other.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        devices_enroll(folder / "fleet", "d1", to=folder / "d1", broker="mqtts://x", user="d1", password=other)
    with pytest.raises(ConfigError, match="needs the device's folder"):
        devices_enroll(folder / "fleet", "d2", broker="mqtts://x", user="d2")


def test_the_aggregator_and_operators_have_the_login_of_fleet_toml(tmp_path: Path) -> None:
    fleet = Fleet.load(founded(tmp_path, "mqtt://127.0.0.1:1883") / "fleet")
    login = {"username": "aggregator", "password": PASSWORDS["aggregator"]}
    assert fleet_certificates.login(fleet) == login
    for url in ("mqtt://127.0.0.1:1883", "mqtts://127.0.0.1:8883"):
        with fleet_certificates.as_operator(fleet, url) as given:
            assert {key: given[key] for key in ("username", "password")} == login
