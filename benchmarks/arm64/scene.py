"""A fleet on this machine and an emulated board, for the proofs on arm64.

The broker is mosquitto with the fleet's own configuration (TLS, certificates); the aggregator, an agent that trains and
the operator's commands are processes here. ``metafleet flash`` makes the board's card from an image that knows of no
device, with a recording at /srv/samples.npz as if the board had made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from benchmarks.arm64 import image, root
from benchmarks.arm64.base import Base
from benchmarks.arm64.machine import DOOR, Board, Machine, Patience
from benchmarks.arm64.root import BOOKWORM, Debian
from cloud_server.broker.mosquitto_config import BrokerSetup
from cloud_server.identity import fleet_certificates
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round, Update
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import schema
from fleet_core.data import heartbeat
from fleet_core.data import samples as stored

PROGRAMS = (*root.PROGRAMS, *image.PROGRAMS, "qemu-system-aarch64", "mosquitto", "debugfs", "fsck.vfat", "e2fsck")
BIN = Path(sys.executable).parent
BOARD = "board"
DESK = "desk"
"""The devices: the emulated one, and the one that trains on this machine."""


class Scene:
    """One fleet with its processes, in ``folder``; used as a context. cores: of the emulated board. user: who logs in
    there."""

    cores = 2
    user = "me"

    def __init__(self, folder: Path, base: Base, say: Callable[[str], None]):
        self.folder, self.base, self.say = folder, base, say
        self.fleet = folder / "fleet"
        self.card = folder / "card.img"
        self.port, self.enrolment_port, self.ssh_port = free_ports(3)
        self._started: list[subprocess.Popen[bytes]] = []
        self.machine: Machine | None = None
        self._turn: IO[bytes] | None = None
        self.began = time.monotonic()

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        if self.machine is not None:
            self.machine.kill()
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
        if self._turn is not None:
            self._turn.close()

    # The fleet --------------------------------------------------------------------------------------------------------

    def found(self, method: str = "pfldyn-proto", rounds: int = 2, **settings: float) -> None:
        """Makes a fleet of heart beats with its broker and aggregator; rounds begin when there are devices that train.
        settings: of [fleet] in fleet.toml."""
        self.metafleet("init", str(self.fleet), "--data", "heartbeat", "--method", method, "--rounds", str(rounds))
        text = (self.fleet / "fleet.toml").read_text()
        for key, value in {"serve_every": 1, **settings}.items():
            text = _set(text, "fleet", f"{key} = {value}")
        (self.fleet / "fleet.toml").write_text(text)
        fleet = Fleet.load(self.fleet)
        with Ledger(fleet.ledger_path) as ledger:
            place = BrokerSetup((DOOR,), self.port, self.enrolment_port, listen="127.0.0.1")
            config = fleet_certificates.configure(fleet, ledger, place)
        self.start("mosquitto", "-c", str(config))
        self.until(lambda: listens(self.port), 300)
        self.start("metafleet", "server", "start", str(self.fleet), "--broker", self.broker, "--quiet")

    @property
    def broker(self) -> str:
        return f"mqtts://127.0.0.1:{self.port}"

    def desk(self, name: str = DESK, patient: int = 0) -> Path:
        """Starts the agent of a device that trains on this machine, by default with the board's recording."""
        home = self.folder / name
        self.metafleet("devices", "enroll", str(self.fleet), name, "--to", str(home), "--broker", self.broker)
        self.samples(home / "samples.npz", patient)
        self.start("edge-agent", "run", "--home", str(home))
        return home

    def samples(self, path: Path, patient: int = 0) -> None:
        """Writes the heart beats of one patient, by the patient's index."""
        found = heartbeat.load_heartbeat()
        stored.save(path, found.of_client(found.clients[patient]))

    # The board --------------------------------------------------------------------------------------------------------

    def flash(self, board: str, *more: str, system: str = "bookworm", tables: str = "") -> None:
        """Makes the card of ``BOARD`` with the product's own command."""
        source = self.folder / "system.img"
        subprocess.run(["cp", "--sparse=always", str(self.base.image), str(source)], check=True)
        recording = self.folder / "recording.npz"
        self.samples(recording)
        image.put(source, recording, "/srv", "samples.npz")
        self.key()
        device = self.device_file(board, system=system, tables=tables)
        self.metafleet("flash", str(device), "--to", f"image:{self.card}", "--image", str(source), *more)

    def device_file(self, board: str, *, system: str = "bookworm", tables: str = "") -> Path:
        """The file that describes ``BOARD`` to ``metafleet flash``. tables: more of its tables."""
        path = self.folder / "board.toml"
        path.write_text(
            f'name = "{BOARD}"\nfleet = "{self.fleet}"\nboard = "{board}"\nos = "{system}"\n'
            f'broker = "mqtts://{DOOR}:{self.port}"\n[ssh]\nuser = "me"\n'
            f'authorized_keys = ["{self.folder}/key.pub"]\n[data]\nsamples = "/srv/samples.npz"\n{tables}'
        )
        return path

    def key(self) -> Path:
        """A key to log in to the board."""
        path = self.folder / "key"
        if not path.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        return path

    def boot(self, cpu: str = "cortex-a53", memory_mib: int = 512) -> Machine:
        """Switches the board on with its card. Only one scene's board runs at a time on this machine; others wait
        here."""
        if self._turn is None:
            self._turn, asked = self.base.turn.open("wb"), time.monotonic()
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            self.began += time.monotonic() - asked
        doors = {self.port: self.port, self.enrolment_port: self.enrolment_port}
        board = Board(cpu, memory_mib, self.cores, doors, self.ssh_port)
        console = self.folder / "console.log"
        self.machine = Machine(board, self.card, self.base.kernel, self.base.initrd, console).start()
        return self.machine

    def first_boot(self, **how: Any) -> None:
        """The first start, at which the system sets up the device; it ends with a restart."""
        self.boot(**how).ended(600)

    def ssh(self, command: str) -> list[str]:
        """The command line that runs ``command`` on the board."""
        return ["ssh", "-i", str(self.key()), "-p", str(self.ssh_port), "-o", "BatchMode=yes",
                "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR",
                f"{self.user}@127.0.0.1", command]

    def on_board(self, command: str, timeout_s: float = 120) -> str:
        """The output of ``command`` on the board, over SSH."""
        patience = Patience(self.machine)
        with subprocess.Popen(self.ssh(command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
            while True:
                try:
                    out, errors = asked.communicate(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    if patience.spent_s() > timeout_s:
                        asked.kill()
                        raise
        if asked.returncode:
            raise AssertionError(f"{command}: {asked.returncode}: {out}{errors}")
        return out

    def host_key(self) -> str:
        """The fingerprint of the image's host key."""
        key = self.base.root / "etc/ssh/ssh_host_ed25519_key.pub"
        return subprocess.run(["ssh-keygen", "-lf", str(key)], check=True, capture_output=True,
                              text=True).stdout.split()[1]  # fmt: skip

    def power_off(self) -> None:
        """Shuts the board down, so that the file systems are unmounted."""
        assert self.machine is not None
        with contextlib.suppress(AssertionError):
            self.on_board("sudo systemctl poweroff")
        self.machine.ended(300)

    # Questions ----------------------------------------------------------------------------------------------------

    def devices(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in json.loads(self.metafleet("devices", "list", str(self.fleet), "--json"))}

    def updates(self, device: str) -> list[Update]:
        """The device's updates in the ledger, by round."""
        with Ledger(self.fleet / "ledger.sqlite", create=False) as ledger:
            return sorted(ledger.rows(Update, device=device), key=lambda update: update.round)

    def rounds(self) -> list[Round]:
        with Ledger(self.fleet / "ledger.sqlite", create=False) as ledger:
            return ledger.rounds()

    def device(self, name: str = BOARD) -> dict[str, Any]:
        """The device's row in the ledger; empty if there is none."""
        with Ledger(self.fleet / "ledger.sqlite", create=False) as ledger:
            found = ledger.device(name)
        return {} if found is None else schema.plain(found)

    def serves(self, device: str, rounds: int = 2) -> bool:
        """Whether the device answers with the last round's served model, personalized."""
        try:
            found = self.answer(device, np.zeros((1, 3, 128), np.float32), timeout_s=60)
        except AssertionError:
            return False
        return bool(found.get("round") == rounds and found.get("personalization") != "none")

    def answer(self, device: str, x: np.ndarray[Any, Any], timeout_s: float = 300) -> dict[str, Any]:
        """The device's answer over MQTT."""
        path = self.folder / "question.npy"
        np.save(path, x)
        found: dict[str, Any] = json.loads(self.metafleet(
            "predict", str(self.fleet), device, str(path), "--broker", self.broker,
            "--timeout-s", f"{timeout_s:g}", "--json",
        ))
        return found

    # Processes --------------------------------------------------------------------------------------------------------

    def metafleet(self, *arguments: str, source: Path | None = None) -> str:
        """The command's output. source: the checkout to run; default: this one. Raises AssertionError if it fails."""
        done = subprocess.run([str(BIN / "metafleet"), *arguments], capture_output=True, text=True, cwd=self.folder,
                              stdin=subprocess.DEVNULL, env=clean(source))  # fmt: skip
        if done.returncode:
            raise AssertionError(f"metafleet {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        found = BIN / program if (BIN / program).exists() else Path(which(program))
        with (self.folder / f"{program}-{len(self._started)}.log").open("wb") as log:
            process = subprocess.Popen([str(found), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       cwd=self.folder, env=clean())  # fmt: skip
        self._started.append(process)
        return process

    def until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Waits until ``condition`` holds. Fails if the board or a process ends before, or after ``timeout_s`` of the
        board's Patience."""
        patience = Patience(self.machine)
        while not condition():
            ended = [process.args for process in self._started if process.poll()]
            if ended or patience.spent_s() > timeout_s:
                raise AssertionError(f"ended: {ended}" if ended else f"not within {timeout_s:g} s:\n{self.said()}")
            if self.machine is not None and not self.machine.runs:
                raise AssertionError(f"the machine has ended:\n{self.said()}")
            time.sleep(0.5)

    def said(self) -> str:
        """The last output of the processes and of the board's console."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def passed(self, what: str) -> float:
        """Prints and returns the seconds since the scene began."""
        seconds = time.monotonic() - self.began
        self.say(f"[{seconds:.0f} s] {what}")
        return seconds


def _set(text: str, table: str, line: str) -> str:
    """fleet.toml with ``line`` in ``table``, replacing a line with the same key."""
    key = line.partition("=")[0].strip()
    kept = [each for each in text.splitlines() if each.partition("=")[0].strip() != key]
    at = kept.index(f"[{table}]") + 1
    return "\n".join([*kept[:at], line, *kept[at:]]) + "\n"


def clean(source: Path | None = None) -> dict[str, str]:
    """This environment without variables that change the commands' defaults. source: the checkout whose modules are
    run; default: this one."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("METAFLEET_")}
    return found if source is None else {**found, "PYTHONPATH": str(source)}


def which(program: str) -> str:
    found = shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if found is None:
        raise FileNotFoundError(program)
    return found


def free_ports(count: int) -> list[int]:
    """Different ports on which nothing listens: all are held until the last one is found."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def scene(folder: Path, base: Path, say: Callable[[str], None], debian: Debian = BOOKWORM) -> Iterator[Scene]:
    """A scene that leaves no process behind. base: folder of the untouched images."""
    folder.mkdir(parents=True, exist_ok=True)
    with Scene(folder, Base(base, say, debian), say) as found:
        yield found
