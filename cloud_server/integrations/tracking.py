"""``--tensorboard`` and ``--mlflow``: a process beside an aggregator or a simulation that writes each round's figures.

It only reads a fleet's ledger or the folders of runs. Therefore a tracking server that fails or is slow delays no
round, and gets what it missed later. A round is written once, because the tracker itself stores the last one. A fleet's
round is written when the next one has closed, or at the end, because evaluations and joules arrive after the close.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from cloud_server.figures.scores import ACCURACY, FIGURES
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import STAGES, TaskEvaluation
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results.result import task_score
from fleet_core.base import processes, schema, storage
from fleet_core.base.errors import ConfigError, FleetError, StateError

LOOK_S = 2.0
MAX_JSON_BYTES = 1 << 26
MAX_ROUNDS_BYTES = 1 << 32
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow"}
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""MLflow's client would retry for minutes; this process retries at its next look."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Options:
    """tensorboard: folder of event files. mlflow: URI of a tracking server. None: not wanted."""

    tensorboard: str | None = None
    mlflow: str | None = None

    @property
    def wanted(self) -> bool:
        return self.tensorboard is not None or self.mlflow is not None


def check(options: Options) -> None:
    """Raises ConfigError for a tracker that is not installed."""
    for name, package in PACKAGES.items():
        if getattr(options, name) is not None and find_spec(package) is None:
            raise ConfigError(f"'{package}' is not installed", where=f"--{name}",
                              hint=f'pip install "metafleet[{name}]"')


class Source(Protocol):
    """A fleet or a run that is followed. name: of the run at the tracker; it differs for other settings. group: of runs
    that belong together."""

    name: str
    group: str

    def settings(self) -> dict[str, Any]:
        """Plain values by dotted name. Raises StateError."""

    def rounds(self, after: int, *, last: bool) -> Iterator[tuple[int, float, Figures]]:
        """(round, Unix time, figures) of the rounds after ``after``, in order. last: there will be no other look.
        Raises FleetError."""


class FleetSource:
    def __init__(self, folder: Path):
        self._fleet = Fleet.load(folder)
        self.group = self._fleet.config.fleet.name
        self.name = f"{self.group}-{self._fleet.lasting_id()}"

    def settings(self) -> dict[str, Any]:
        return flat(schema.plain(self._fleet.config))

    def rounds(self, after: int, *, last: bool) -> Iterator[tuple[int, float, Figures]]:
        with Ledger(self._fleet.ledger_path, create=False) as ledger:
            closed = [row for row in ledger.rounds("closed") if row.round > after]
            if not last:
                closed = closed[:-1]
            if not closed:
                return
            within = range(closed[0].round, closed[-1].round + 1)
            volume, joules = ledger.volume("round", within), ledger.joules("round", within)
            scored: dict[int, dict[str, list[float]]] = {}
            for number, _, stage, new, accuracy in ledger.accuracies(within):
                if not new:
                    scored.setdefault(number, {}).setdefault(stage, []).append(accuracy)
            predicted: dict[tuple[int, str], list[TaskEvaluation]] = {}
            for one in ledger.each(TaskEvaluation, within, new=False):
                predicted.setdefault((one.round, one.stage), []).append(one)
            for row in closed:
                moved, spent = volume.get(row.round), joules.get(row.round)
                payload = None if moved is None else moved.payload
                stages = {stage: sum(found) / len(found) for stage, found in scored.get(row.round, {}).items()}
                measures = {
                    f"{measure}/{stage}/{output}": value for stage in STAGES
                    if (score := task_score(predicted.get((row.round, stage), []))) is not None
                    for measure, values in score.measures.items() for output, value in values.items()
                }
                yield row.round, row.closed_at or time.time(), _known({
                    "loss": row.loss, "accuracy/before": stages.get("before"), "accuracy/after": stages.get("after"),
                    "bytes/up": None if payload is None else payload.up,
                    "bytes/down": None if payload is None else payload.down,
                    "joules": None if spent is None else spent.value, "seconds": row.seconds, **measures,
                })


class RunSource:
    """A simulated run's folder (``cloud_server.laboratory.run.run_folder``)."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._asked = storage.read_bytes(folder / "run.json", limit=MAX_JSON_BYTES)
        self.group = str(self.settings().get("experiment.name", folder.parent.name))
        self.name = f"{folder.name}-{hashlib.sha256(self._asked).hexdigest()[:8]}"

    def settings(self) -> dict[str, Any]:
        return flat(json.loads(self._asked))

    def rounds(self, after: int, *, last: bool) -> Iterator[tuple[int, float, Figures]]:
        path = self._folder / "rounds.jsonl"
        if not path.exists():
            return
        for line in storage.read_bytes(path, limit=MAX_ROUNDS_BYTES).decode("utf-8", "replace").splitlines():
            try:
                row = json.loads(line)
                number = int(row["round"])
            except (ValueError, KeyError, TypeError):
                continue  # the line that is being written
            if number > after:
                yield number, time.time(), _of_row(row)


def _of_row(row: Mapping[str, Any]) -> Figures:
    accuracy, before = row.get("accuracy", {}), row.get("before", {}).get("accuracy", {})
    of_task = {f"{key}/{name}": row[key].get(name) for key in FIGURES if key in row and key != ACCURACY.key
               for name in ("mean", "worst")}
    return _known({
        "loss": row.get("loss"), "accuracy/before": before.get("mean"), "accuracy/after": accuracy.get("mean"),
        "accuracy/worst": accuracy.get("worst"), **of_task,
        "bytes/up": row.get("payload_bytes", {}).get("up"), "bytes/down": row.get("payload_bytes", {}).get("down"),
        "joules": row.get("energy_j", {}).get("value"),
    })


def _known(figures: Mapping[str, float | None]) -> Figures:
    """The figures that are finite."""
    return {name: float(value) for name, value in figures.items() if value is not None and math.isfinite(value)}


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as dotted names; lists as JSON."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        elif value is not None:
            found[f"{before}{key}"] = json.dumps(value) if isinstance(value, list | tuple) else value
    return found


# Trackers -------------------------------------------------------------------------------------------------------------


class Tracker(Protocol):
    """One run at a tracker. Whatever it raises, the next look tries again."""

    def last(self) -> int:
        """The last round that it has; 0 for none."""

    def write(self, number: int, at_s: float, figures: Figures) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``folder``/NAME, written by the package tensorboard alone, without torch or TensorFlow."""

    def __init__(self, folder: str, source: Source):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = Path(folder) / source.name
        self._last = self._read()
        self._writer = EventFileWriter(str(self._folder))
        if not self._last:
            self._put(0, time.time(), self._parameters(source.settings()))

    def last(self) -> int:
        return self._last

    def write(self, number: int, at_s: float, figures: Figures) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in {"round": number, **figures}.items()]
        self._put(number, at_s, Summary(value=values))
        self._last = number

    def close(self) -> None:
        self._writer.close()

    def _read(self) -> int:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if not self._folder.is_dir():
            return 0
        found = EventAccumulator(str(self._folder), size_guidance={"scalars": 1})  # the newest of each tag
        found.Reload()
        return max((one.step for one in found.Scalars("round")), default=0) if "round" in found.Tags()["scalars"] else 0

    def _put(self, step: int, at_s: float, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=at_s, step=step, summary=summary))
        self._writer.flush()

    @staticmethod
    def _parameters(settings: Mapping[str, Any]) -> Any:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        return hparams_pb(dict(settings))


class MLflow:
    """A run of the experiment ``source.group`` at a tracking server, found again by its tag ``metafleet.run``."""

    TAG = "metafleet.run"

    def __init__(self, uri: str, source: Source):
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri)
        self._run = self._found(source) or self._made(source)

    def last(self) -> int:
        return int(self._client.get_run(self._run).data.metrics.get("round", 0))

    def write(self, number: int, at_s: float, figures: Figures) -> None:
        from mlflow.entities import Metric

        at_ms = int(at_s * 1000)
        metrics = [Metric(name, value, at_ms, number) for name, value in {**figures, "round": float(number)}.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _found(self, source: Source) -> str | None:
        wanted = f"tags.`{self.TAG}` = '{source.name}'"
        runs = self._client.search_runs([self._experiment(source.group)], wanted, max_results=1)
        if not runs:
            return None
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)

    def _made(self, source: Source) -> str:
        from mlflow.entities import Param

        run = self._client.create_run(self._experiment(source.group), tags={self.TAG: source.name},
                                      run_name=source.name)
        parameters = [Param(name, str(value)[:500]) for name, value in source.settings().items()]
        for start in range(0, len(parameters), 100):  # MLflow's limit for a batch
            self._client.log_batch(run.info.run_id, params=parameters[start : start + 100])
        return str(run.info.run_id)


# Following ------------------------------------------------------------------------------------------------------------


class Follower:
    """Writes new rounds of one source to one tracker at each look."""

    def __init__(self, source: Source, kind: str, make: Callable[[Source], Tracker], say: Callable[[str], None]):
        self._source, self._kind, self._make, self._say = source, kind, make, say
        self._tracker: Tracker | None = None
        self._problem = ""

    def look(self, *, last: bool = False) -> None:
        try:
            self._write(last)
            problem = ""
        except Exception as error:  # any exception: a tracker is a foreign program
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if problem and problem != self._problem:
            self._say(f"{self._kind}, {self._source.name}: {problem}")
        self._problem = problem

    def _write(self, last: bool) -> None:
        if self._tracker is None:
            self._tracker = self._make(self._source)
        for number, at_s, figures in self._source.rounds(self._tracker.last(), last=last):
            self._tracker.write(number, at_s, figures)
        if last:
            self._tracker.close()


def followers(source: Source, options: Options, say: Callable[[str], None]) -> list[Follower]:
    made = []
    tensorboard, mlflow = options.tensorboard, options.mlflow
    if tensorboard is not None:
        made.append(Follower(source, "tensorboard", lambda one: TensorBoard(tensorboard, one), say))
    if mlflow is not None:
        made.append(Follower(source, "mlflow", lambda one: MLflow(mlflow, one), say))
    return made


def follow(
    fleet: Path | None, runs: Sequence[Path], options: Options, stopped: Callable[[], bool], say: Callable[[str], None]
) -> None:
    """Follows a fleet, or runs as soon as their folders are there, until ``stopped``; then looks once more."""
    waiting, working = list(runs), [] if fleet is None else followers(FleetSource(fleet), options, say)
    looked_at = float("-inf")
    while True:
        last = stopped()
        if last or time.monotonic() - looked_at >= LOOK_S:
            for folder in list(waiting):
                try:
                    source = RunSource(folder)
                except (StateError, ValueError):
                    continue  # not begun yet
                waiting.remove(folder)
                working += followers(source, options, say)
            for one in working:
                one.look(last=last)
            looked_at = time.monotonic()
        if last:
            return
        time.sleep(0.1)


def main(arguments: Sequence[str]) -> None:
    """arguments: one JSON table with ``fleet`` or ``runs``, and the options."""
    asked = json.loads(arguments[0])
    options = Options(asked["tensorboard"], asked["mlflow"])
    fleet = None if asked["fleet"] is None else Path(asked["fleet"])
    with processes.until_signal() as stopped:
        print(" and ".join(name for name in PACKAGES if asked[name] is not None), flush=True)
        try:
            follow(fleet, [Path(one) for one in asked["runs"]], options, stopped, processes.say)
        except FleetError as error:
            processes.say(str(error))


if __name__ == "__main__":
    processes.guarded(lambda: main(sys.argv[1:]))
