"""Options and files of ``metafleet demo``: the run's folder, its fleet.toml, and a folder for every device."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_server.choices.first_settings import OF_CLASSES, SampleOptions, fleet_toml, model_for
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import processes, schema, storage
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.board.device_settings import ENGINES
from fleet_core.data import heartbeat, samples, time_split
from fleet_core.data.samples import Samples
from fleet_core.protocol import topics

DEFAULT_OUT = "demo-run"
HEARTBEAT_SUPPORT_S = 300.0


@dataclass(frozen=True)
class Options(SampleOptions):
    """The command's options. They are written to demo.json, so that an unfinished run continues with the same options.

    support_s: seconds that a new device learns from; None: 300 s of heart beats, and in a file the same share of the
    time as devices that train. codec: as in ``codec_catalogue.chosen``; None for the default. engine: ``[train]
    engine`` of the devices that train.
    """

    devices: int = 8
    new_devices: int = 2
    rounds: int = 30
    method: str = OF_CLASSES
    data: str = "heartbeat"
    seed: int = 0
    baseline: bool = True
    support_s: float | None = None
    meter_watts: tuple[float, ...] | None = None
    codec: str | None = None
    engine: str = field(default="torch", metadata={"choices": ENGINES})


def run_folder(options: Options, out: Path | None) -> Path:
    """The run's folder: a new one, or that of an unfinished run with the same options. Raises DataError or ConfigError
    for impossible options, and ConfigError for a folder that cannot be used."""
    folder = out or _free_folder(options)
    note = folder / "demo.json"
    if note.exists():
        if _options_of(note) != options:
            raise ConfigError("holds a run with other options", where=str(folder), hint="give another --out")
        processes.say(f"the run in {folder} goes on")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("is not empty and holds no run", where=str(folder), hint="give another --out")
    demo_fleet_toml(options, processes.say)  # reports every mistake before anything is written
    storage.write_json(note, schema.plain(options))
    return folder


def _options_of(note: Path) -> Options:
    """The options of an earlier run. Raises ConfigError for an unreadable file."""
    try:
        known, problems = schema.read(Options, json.loads(storage.read_bytes(note, limit=1 << 16)))
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", where=str(note), hint="give another --out") from error
    if known is None:
        raise ConfigError("; ".join(map(str, problems)), where=str(note), hint="give another --out")
    return known


def _free_folder(options: Options) -> Path:
    """``demo-run``; with the next number if that folder holds a finished run, or a run with other options."""
    number, folder = 1, Path(DEFAULT_OUT)
    while (folder / "result.json").exists() or (
        (folder / "demo.json").exists() and _options_of(folder / "demo.json") != options
    ):
        number += 1
        folder = Path(f"{DEFAULT_OUT}-{number}")
    return folder


def demo_fleet_toml(options: Options, say: Callable[[str], None] = lambda text: None) -> str:
    """The run's fleet.toml. say: as in ``load_data``. Raises DataError or ConfigError for impossible options."""
    if options.engine not in ENGINES:
        raise ConfigError(f"there is no engine '{options.engine}'", where="--engine", expected=" or ".join(ENGINES))
    everything, spec = options.load(options.data, say, anomalies=True)
    training, joining = _names(options, everything)
    for name in (*training, *joining):
        topics.check_name(name, "device")
        _check_samples(options, name, everything.of_client(name), late=name in joining)
    learned = options.of_fleet_toml(everything, spec, ())  # devices' files have the labels quiet and anomaly
    model = None if learned["quiet"] else model_for(options.data, everything)
    return fleet_toml(
        everything, "demo", options.method, model, rounds=options.rounds, seed=options.seed, spec=spec,
        min_devices=options.devices, serve_every=max(1, min(10, options.rounds)), codec=options.codec,
        enrolment="listed", **learned,
    )


def _names(options: Options, everything: Samples) -> tuple[list[str], list[str]]:
    """(devices that train, devices that join at the end). Raises DataError when there are too few clients."""
    if options.data == "heartbeat" and options.devices <= len(heartbeat.DEVICES):
        pool, late = list(heartbeat.DEVICES), list(heartbeat.NEW_DEVICES)
    else:
        pool = list(everything.clients)
        late = pool[options.devices:]
    if len(pool) < options.devices or len(late) < options.new_devices:
        raise DataError(
            f"holds {len(set(pool + late))} clients", where=options.data,
            expected=f"{options.devices} that train and {options.new_devices} that join",
            hint="give --devices and --new-devices that fit; a file needs an array 'client'",
        )
    return pool[: options.devices], late[: options.new_devices]


def _check_samples(options: Options, name: str, own: Samples, *, late: bool) -> None:
    """Raises DataError if a device has no samples to learn from or none to be evaluated on."""
    seconds = _support_s(options) if late else None
    try:
        later = time_split.learned(own, seconds=seconds)[1]
    except DataError as error:
        raise DataError(f"of {name}, {error.what}", where=options.data, expected=error.expected,
                        hint="leave --support-seconds out") from error
    if not len(later):
        hint = "" if seconds is None else "lower --support-seconds, or leave it out"
        raise DataError(f"all {len(own)} samples of {name} are used for learning", where=options.data,
                        expected="some later samples to evaluate on", hint=hint)


def _support_s(options: Options) -> float | None:
    """Seconds that a new device learns from; None for a share of its time."""
    return options.support_s or (HEARTBEAT_SUPPORT_S if options.data == "heartbeat" else None)


def write_devices(options: Options, folder: Path, fleet: Fleet) -> tuple[list[Path], list[Path]]:
    """Writes a folder for every device with its own samples: (those that train, those that join at the end)."""
    everything, _ = options.load(options.data, anomalies=True)
    training, joining = _names(options, everything)
    watts = options.meter_watts
    tables: dict[str, dict[str, Any]] = {} if watts is None else {"power": {"idle_w": watts[0], "busy_w": watts[1]}}
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        tables["board"] = {"profile": "x86-64"}
    seconds = _support_s(options)
    homes: dict[str, Path] = {}
    for name in (*training, *joining):
        home = homes[name] = folder / "devices" / name
        late = name in joining
        data = {"support_seconds": seconds} if late and seconds is not None else {}
        train: dict[str, Any] = {"enabled": not late}
        if options.engine == "onnx" and not late:
            train["engine"] = "onnx"
        write_device_folder(fleet, name, home, "mqtt://127.0.0.1:1883", data=data, train=train, **tables)
        if not (home / "samples.npz").exists():
            samples.save(home / "samples.npz", everything.of_client(name))
    return [homes[name] for name in training], [homes[name] for name in joining]
