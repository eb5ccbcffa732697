"""A stranger's way with a file: the commands of docs/first-fleet.md as processes, with no setting but the file's name.

``walk`` returns the commands with their exit codes, seconds and output, and the devices' answers. It ends at a command
that fails: ``Failed`` names it, with its output. Only the broker is chosen, so that every machine runs the same one:
the embedded broker, on any free port.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.own_data import files
from benchmarks.own_data.commands import COMMAND_S, Commands, Failed, text
from benchmarks.own_data.files import Part
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Alone, Evaluation
from edge_agent.http.tensors import OF_NUMPY

FLEET, BUNDLE, REPORT = "plant", "plant.bundle", "report.html"
ROUNDS_S = 1200.0
REFUSED = "not personalized, the former model answers"
ASKED = 3  # samples in a question for a person, and over HTTP
TRAINING, LATE = 4, 2
LEARNED = 0.6  # of the recording: the default of device.toml
LATE_WINDOWS, LATE_MORE = 24, 24
"""Windows of a late joiner's recording: in its file at first, and labelled by hand later."""


@dataclass(frozen=True, eq=False)
class Device:
    """recorded: in its file. later: the last 40 % of its recording, its test samples. more: windows of a late joiner
    that are labelled by hand later."""

    name: str
    recorded: Part
    later: Part
    more: Part | None = None

    @property
    def learned(self) -> Part:
        """The part of its file that a device learns from; it is evaluated on the rest."""
        return self.recorded.take(slice(0, round(LEARNED * len(self.recorded.y))))


def devices_of(every: Part) -> list[Device]:
    """The first four train on their whole recording; the others have little of it. Test samples are at the end."""
    found = []
    for k, name in enumerate(every.clients):
        own = every.of(name)
        cut = round(LEARNED * len(own.y))
        late = min(LATE_WINDOWS, cut // 2)
        more = own.take(slice(late, late + min(LATE_MORE, cut - late))) if k >= TRAINING else None
        found.append(Device(name, own.take(slice(0, late)) if k >= TRAINING else own, own.take(slice(cut, None)), more))
    return found


# The walk -------------------------------------------------------------------------------------------------------------


def walk(folder: Path, devices: list[Device], form: str, init: tuple[str, ...] = ()) -> dict[str, Any]:
    """From the file to the bundle, in ``folder``, which is made anew. init: further options of ``metafleet init``.

    {commands, facts, answers: {device: labels of its ``later``}, first: {device: labels before more was labelled}}.
    Raises Failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commands = Commands(folder)
    with ExitStack() as stack:
        stack.callback(_write_notes, commands)
        stack.callback(commands.end)
        return _walked(commands, devices, form, init)


def _write_notes(commands: Commands) -> None:
    (commands.folder / "commands.json").write_text(json.dumps(commands.noted, indent=1))


def _walked(commands: Commands, devices: list[Device], form: str, init: tuple[str, ...]) -> dict[str, Any]:
    begun = time.monotonic()
    training = devices[:TRAINING]
    together = Part(*(np.concatenate([getattr(device.learned, key) for device in training])
                      for key in ("x", "y", "client", "time")))
    file = files.write(together, commands.folder / "samples", form)
    window = ("--window", together.x.shape[-1]) if form == files.LONG else ()
    init_s = time.monotonic()
    made = commands.done("metafleet", "init", FLEET, "--data", file.name, *window, *init)
    init_s = time.monotonic() - init_s
    server, log = commands.start("metafleet", "server", "start", FLEET, "--broker", "embedded", "--port", 0, "--quiet")
    commands.says(log, "broker: ")

    rounds_s = time.monotonic()
    agents = _joined(commands, training, form)
    with Ledger(commands.folder / FLEET / "ledger.sqlite") as ledger:
        rounds = _rounds(commands.folder)
        _evaluated(commands, ledger, rounds, [device.name for device in training])
        rounds_s = time.monotonic() - rounds_s
        agents += _joined(commands, devices[TRAINING:], form)
        _evaluated(commands, ledger, rounds, [device.name for device in devices])
        ends = [(row.seconds or 0.0) for row in ledger.rounds("closed")]

    status = json.loads(commands.done("metafleet", "server", "status", FLEET, "--json").stdout)
    told = commands.done("metafleet", "server", "status", FLEET).stdout
    commands.done("metafleet", "server", "rounds", FLEET)
    commands.done("metafleet", "devices", "list", FLEET)
    commands.done("metafleet", "report", FLEET, "--out", REPORT)
    page = html.unescape((commands.folder / REPORT).read_text())

    _asked_today(commands, training[0], form)
    first = {device.name: _predicted(commands, device) for device in devices}
    ours = json.loads(commands.done("metafleet", "predict", FLEET, training[0].name, _later(commands, training[0]),
                                    "--json").stdout)["labels"]
    _same("metafleet predict and edge-agent predict", ours, first[training[0].name])
    answers = first | {device.name: _taught(commands, device, form) for device in devices[TRAINING:TRAINING + 1]}
    _served(commands, devices[-1], answers[devices[-1].name])
    _installed(commands, devices[-1], answers[devices[-1].name])
    commands.stop(*agents)
    commands.stop(server)
    warnings = {"init": _warnings(made.stdout), "status": _warnings(told)}
    return {
        "answers": answers, "first": first, "commands": len(commands.noted),
        "facts": {
            "model": _model(made.stdout), "rounds": status["rounds_closed"],
            "seconds": {"init": round(init_s, 1), "rounds": round(rounds_s, 1), "round": float(np.median(ends)),
                        "all": round(time.monotonic() - begun, 1)},
            "payload_bytes": status["totals"]["payload_bytes"], "verdict": status.get("verdict"),
            "warnings": warnings | {"report": [said for said in warnings["status"] if said in page],
                                    "log": _warnings(text(log))},
        },
    }  # fmt: skip


def _joined(commands: Commands, devices: list[Device], form: str) -> list[subprocess.Popen[bytes]]:
    """Starts the devices' agents, each with its own samples beside its device.toml."""
    for device in devices:
        commands.done("metafleet", "devices", "enroll", FLEET, device.name, "--to", device.name)
        home = commands.folder / device.name
        own = files.write(device.recorded, home / "samples", form)
        files.write(device.later, home / "later", form)
        if own.name != "samples.npz":  # as 'metafleet devices enroll' says
            with (home / "device.toml").open("a") as file:
                file.write(f'\n[data]\nsamples = "{own.name}"\n')
    started = [commands.start("edge-agent", "run", "--home", device.name) for device in devices]
    for device, (_, log) in zip(devices, started, strict=True):
        commands.says(log, f"{device.name} is on")
    return [process for process, _ in started]


def _rounds(folder: Path) -> int:
    found = re.search(r"^rounds = (\d+)", (folder / FLEET / "fleet.toml").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def _evaluated(commands: Commands, ledger: Ledger, rounds: int, names: list[str]) -> None:
    """Waits until these devices have evaluated the last round's model on their held-back samples."""
    def there() -> bool:
        of_last = {row.device for row in ledger.rows(Evaluation, round=rounds)}
        return {row.device for row in ledger.rows(Alone)} & of_last >= set(names)

    commands.until(there, f"the answers of {', '.join(names)} after round {rounds}", ROUNDS_S)


def _later(commands: Commands, device: Device) -> str:
    (found,) = (commands.folder / device.name).glob("later.*")
    return str(found.relative_to(commands.folder))


def _asked_today(commands: Commands, device: Device, form: str) -> None:
    """Both ways to ask a device, with output for a person."""
    today = files.write(device.later.take(slice(0, ASKED)), commands.folder / "today", form)
    commands.done("edge-agent", "predict", today.name, "--home", device.name)
    commands.done("metafleet", "predict", FLEET, device.name, today.name)
    commands.done("edge-agent", "status", "--home", device.name)


def _predicted(commands: Commands, device: Device, home: str | None = None) -> list[str]:
    """The device's answers to its test samples."""
    asked = ("edge-agent", "predict", _later(commands, device), "--home", home or device.name, "--json")
    labels = [str(label) for label in json.loads(commands.done(*asked).stdout)["labels"]]
    if len(labels) != len(device.later.y):
        raise Failed(f"{' '.join(asked)}: {len(labels)} answers, expected {len(device.later.y)}")
    return labels


def _taught(commands: Commands, device: Device, form: str) -> list[str]:
    """The answers of a late joiner after more samples were labelled by hand and it was personalized, unless the answers
    to its held-back samples would get worse."""
    assert device.more is not None
    for label in sorted(set(map(str, device.more.y))):
        few = device.more.take(device.more.y == label)
        few = Part(few.x, few.y, few.client, np.arange(len(few.y)) * 1.0)  # one after the other, without gaps
        file = files.write(few, commands.folder / device.name / f"more-{label}", form)
        commands.done("edge-agent", "samples", "add", file.relative_to(commands.folder), "--label", label, "--home",
                      device.name)
    commands.done("edge-agent", "samples", "list", "--home", device.name)
    commands.done("edge-agent", "personalize", "--home", device.name, refusal=REFUSED)
    return _predicted(commands, device)


def _served(commands: Commands, device: Device, expected: list[str]) -> None:
    """One question over HTTP, in the Open Inference Protocol."""
    process, log = commands.start("edge-agent", "serve", "--home", device.name, "--port", 0)
    commands.says(log, "http://")
    url = re.findall(r"http://[^/\s]+", text(log))[0]
    x = device.later.x[:ASKED]
    asked = {"name": "x", "datatype": OF_NUMPY[str(x.dtype)], "shape": list(x.shape), "data": x.ravel().tolist()}
    request = urllib.request.Request(f"{url}/v2/models/{FLEET}/infer", json.dumps({"inputs": [asked]}).encode())
    with urllib.request.urlopen(request, timeout=COMMAND_S) as response:
        said = response.read().decode()
    commands.noted.append({"command": f"POST {request.selector}", "exit_code": 0, "stdout": said, "stderr": ""})
    outputs = {output["name"]: output["data"] for output in json.loads(said)["outputs"]}
    _same("HTTP and edge-agent predict", outputs["label"], expected[:ASKED])
    commands.stop(process)


def _installed(commands: Commands, device: Device, expected: list[str]) -> None:
    """A bundle, on a new device with the same samples, without the broker."""
    commands.done("metafleet", "export", FLEET, "--to", BUNDLE)
    home, new = commands.folder / device.name, commands.folder / "installed"
    new.mkdir()
    for path in home.glob("samples.*"):
        shutil.copy(path, new / path.name)
        if path.suffix != ".npz":
            shutil.copy(home / "device.toml", new / "device.toml")
    commands.done("edge-agent", "install", BUNDLE, "--home", new.name)
    _same("a device with the bundle and the device of the fleet", _predicted(commands, device, new.name), expected)


def _same(what: str, one: list[str], other: list[str]) -> None:
    differ = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if differ:
        raise Failed(f"{what} answer differently on {len(differ)} of {len(one)} samples: {differ[:10]}")


def _warnings(said: str) -> list[str]:
    return re.findall(r"warning: (.*)", said)


def _model(said: str) -> str:
    found = re.search(r"^fleet .*?, model ([\w:.-]+)", said, re.MULTILINE)
    assert found is not None, said
    return found[1]
