"""The passphrase of the fleet's keys: what it seals, where it comes from, and that a power cut leaves every key
readable."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_server.commands import cli, doctor
from cloud_server.devices import fleet_status
from cloud_server.identity import fleet_certificates, token_authority
from cloud_server.ledger.ledger import Ledger
from cloud_server.records import key_files
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.key_files import KEYS
from cloud_server.running import aggregator_process, systemd_service
from cloud_server.running.backup import backup
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.protocol.signing import Verifier
from tests.support.cli import runner
from tests.support.pki import fleet_without_model
from tests.support.powercut import cut_at

FIRST, SECOND = "the first passphrase", "the second passphrase"


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(key_files, "COST", 1 << 14)
    key_files.forget()
    yield
    key_files.forget()


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return fleet_without_model(tmp_path / "fleet")


class Passphrase:
    """A file with the passphrase, which the environment names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self._folder, self._patch = folder, monkeypatch

    def __call__(self, text: str, variable: str = key_files.FROM_FILE) -> None:
        path = self._folder / variable.lower()
        path.write_text(f"{text}\n")
        self._patch.setenv(variable, str(path))
        key_files.forget()


@pytest.fixture
def passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Passphrase:
    return Passphrase(tmp_path, monkeypatch)


def works(fleet: Fleet) -> bool:
    """The keys sign what the public halves verify."""
    Verifier(fleet.public_key()).verify(fleet.signer().sign(b"a round"))
    fleet_certificates.authority(fleet.folder)
    token_authority.present(fleet.folder)
    return True


def plain_keys(fleet: Fleet) -> dict[str, bytes]:
    return {name: (fleet.folder / name).read_bytes() for name in KEYS if (fleet.folder / name).exists()}


def test_encrypted_keys_sign_with_the_passphrase_and_are_nowhere_plain(fleet: Fleet, passphrase: Passphrase) -> None:
    secrets = plain_keys(fleet)
    assert len(secrets) == 3
    passphrase(FIRST)
    key_files.encrypt(fleet.folder)
    assert key_files.state(fleet.folder) == "encrypted"
    assert works(fleet)
    for name, secret in secrets.items():
        path = fleet.folder / name
        assert path.stat().st_mode & 0o077 == 0
        core = secret.strip().splitlines()[-2 if b"BEGIN" in secret else 0]
        assert all(core not in kept.read_bytes() for kept in fleet.folder.iterdir() if kept.is_file())


def test_a_server_with_a_wrong_passphrase_does_not_start(fleet: Fleet, passphrase: Passphrase) -> None:
    passphrase(FIRST)
    key_files.encrypt(fleet.folder)
    passphrase(SECOND)
    with pytest.raises(StateError, match="the passphrase is wrong"):
        aggregator_process.start(fleet.folder, broker=None, host="127.0.0.1", port=0, plain=False, connect_s=1.0,
                                 until_done=False, quiet=True)


def test_a_wrong_passphrase_is_one_error_and_so_is_a_missing_one(
    fleet: Fleet, passphrase: Passphrase, monkeypatch: pytest.MonkeyPatch
) -> None:
    passphrase(FIRST)
    key_files.encrypt(fleet.folder)
    passphrase(SECOND)
    with pytest.raises(StateError, match="the passphrase is wrong"):
        fleet.signer()
    monkeypatch.delenv(key_files.FROM_FILE)
    with pytest.raises(StateError, match="no terminal") as told:
        fleet_certificates.authority(fleet.folder)
    assert key_files.FROM_FILE in str(told.value.hint)


def test_at_a_terminal_it_is_asked_for_once_and_never_shown(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return FIRST

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", answer)
    key_files.encrypt(fleet.folder)
    assert len(asked) == 3, "the new one twice, and to open what was written"
    assert works(fleet)
    assert len(asked) == 3
    assert FIRST not in "".join(capsys.readouterr())


@pytest.mark.parametrize(("first", "second", "said"), [("short", "short", "too short"), (FIRST, SECOND, "differ")])
def test_a_short_or_mistyped_passphrase_changes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, first: str, second: str, said: str
) -> None:
    typed, before = iter((first, second)), plain_keys(fleet)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    with pytest.raises(ConfigError, match=said):
        key_files.encrypt(fleet.folder)
    assert plain_keys(fleet) == before


@pytest.mark.slow
@pytest.mark.parametrize("what", ["encrypt", "change", "decrypt"])
def test_a_cut_at_any_write_leaves_every_key_readable_and_the_command_can_be_repeated(
    tmp_path: Path, passphrase: Passphrase, what: str
) -> None:
    for cut in range(1, 10):
        fleet = fleet_without_model(tmp_path / f"fleet{cut}")
        passphrase(FIRST)
        passphrase(SECOND, key_files.NEW_FROM_FILE)
        if what != "encrypt":
            key_files.encrypt(fleet.folder)
        with cut_at(cut) as begun:
            getattr(key_files, what)(fleet.folder)
        passphrase(SECOND if what == "change" and begun[0] < cut else FIRST)
        assert works(fleet)
        getattr(key_files, what)(fleet.folder)
        passphrase(SECOND if what == "change" else FIRST)
        assert works(fleet)
        assert key_files.state(fleet.folder) == ("plain" if what == "decrypt" else "encrypted")
        if begun[0] < cut:
            break
    assert cut - 1 == {"encrypt": 4, "change": 1, "decrypt": 3}[what]


def test_another_passphrase_opens_the_keys_and_the_one_before_does_not(fleet: Fleet, passphrase: Passphrase) -> None:
    passphrase(FIRST)
    key_files.encrypt(fleet.folder)
    sealed = plain_keys(fleet)
    passphrase(SECOND, key_files.NEW_FROM_FILE)
    key_files.change(fleet.folder)
    assert plain_keys(fleet) == sealed, "one file changes"
    passphrase(FIRST)
    with pytest.raises(StateError, match="wrong"):
        fleet.signer()
    passphrase(SECOND)
    assert works(fleet)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keys.seal", "fleet.key"])
def test_a_damaged_or_foreign_sealed_file_is_refused(
    tmp_path: Path, fleet: Fleet, passphrase: Passphrase, name: str
) -> None:
    passphrase(FIRST)
    key_files.encrypt(fleet.folder)
    path = fleet.folder / name
    whole = json.loads(path.read_text())
    bad = [{**whole, "data": whole["data"][:-2] + "zz"}, {**whole, "nonce": ""}, {**whole, "cost": 1 << 40},
           {**whole, "data": ("ff" if whole["data"].startswith("00") else "00") + whole["data"][2:]}]
    for wrong in bad:
        path.write_text(json.dumps(wrong))
        key_files.forget()
        with pytest.raises(StateError):
            fleet.signer()
    other = fleet_without_model(tmp_path / "other")
    key_files.encrypt(other.folder)
    path.write_bytes((other.folder / name).read_bytes())
    key_files.forget()
    with pytest.raises(StateError):
        fleet.signer()


def test_a_backup_keeps_them_encrypted_and_doctor_and_status_say_so(
    fleet: Fleet, passphrase: Passphrase, tmp_path: Path
) -> None:
    with Ledger(fleet.ledger_path) as ledger:
        assert doctor.private_keys(fleet.folder).state == "note"
        passphrase(FIRST)
        key_files.encrypt(fleet.folder)
        backup(fleet, tmp_path / "copy")
        assert plain_keys(Fleet.load(tmp_path / "copy")) == plain_keys(fleet)
        assert works(Fleet.load(tmp_path / "copy"))
        assert doctor.private_keys(fleet.folder).state == "ok"
        facts = fleet_status.facts(fleet, ledger)
        assert facts["keys"] == "encrypted"
        assert "the fleet's keys are encrypted" in list(fleet_status.lines(facts, fleet.folder))


def test_a_service_gets_the_passphrase_from_systemd_alone(
    fleet: Fleet, passphrase: Passphrase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, load in (("secret", "LoadCredential"), ("secret.cred", "LoadCredentialEncrypted")):
        unit = systemd_service.service_of(fleet, [], user=True, home=tmp_path, passphrase=tmp_path / name)
        assert f"\n{load}=metafleet-passphrase:{tmp_path / name}\n" in unit.text
    assert "LoadCredential" not in systemd_service.service_of(fleet, [], user=True, home=tmp_path).text
    passphrase(FIRST)
    key_files.encrypt(fleet.folder)
    monkeypatch.delenv(key_files.FROM_FILE)
    key_files.forget()
    (tmp_path / "metafleet-passphrase").write_text(FIRST)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert works(fleet)


@pytest.mark.slow
def test_the_command_encrypts_changes_and_removes_and_refuses_while_an_aggregator_runs(
    fleet: Fleet, passphrase: Passphrase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys, "metafleet", cli.main)
    passphrase(FIRST)
    passphrase(SECOND, key_files.NEW_FROM_FILE)
    with fleet.lock():
        assert "another aggregator is running" in run("server", "encrypt-keys", fleet.folder).err
    assert run("server", "encrypt-keys", fleet.folder).out == "keys encrypted\n"
    assert run("server", "encrypt-keys", fleet.folder, "--change").out == "another passphrase\n"
    passphrase(SECOND)
    assert run("server", "encrypt-keys", fleet.folder, "--remove").out == "keys plain\n"
    assert run("server", "encrypt-keys", fleet.folder, "--change").code == 2
    assert run("server", "encrypt-keys", fleet.folder, "--change", "--remove").code == 2
    assert works(fleet)
    assert (fleet.folder / "audit.ndjson").read_text().count('"encrypt keys"') == 3
