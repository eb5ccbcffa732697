"""Metafleet from Python: run simulations, read runs and fleets as rows, compare them, draw them.

Rows are lists of flat dictionaries, which ``pandas.DataFrame(rows)`` and ``polars.DataFrame(rows)`` take as they are. A
figure that was not measured has no key in its row, never 0. Everything is imported when it is called, so that
``import metafleet`` loads no torch.

    import metafleet

    runs = metafleet.simulate("har.toml", out="runs")
    rows = [row for run in runs for row in run.curve()]
    metafleet.compare(runs, out="comparison")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet_core import __version__

if TYPE_CHECKING:
    from cloud_server.laboratory.compare.finished_runs import FinishedRun
    from cloud_server.ledger.ledger import Ledger

__all__ = ["Fleet", "Row", "Run", "__version__", "compare", "read_runs", "simulate"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run that has ended, of a simulation, a demo or a fleet. ``finished`` has all that was read of it."""

    finished: FinishedRun

    @property
    def label(self) -> str:
        """The method's, with the values of its grid."""
        return self.finished.label

    @property
    def method(self) -> str:
        return self.finished.method

    @property
    def seed(self) -> int:
        return self.finished.seed

    def curve(self) -> list[Row]:
        """One row for each evaluated round and kind of devices (``devices``: those that train; ``new SHARE``:
        new ones that learned from this share of their samples; ``novel``: those with classes that nobody trained).

        mean, worst, best, variance: accuracy over the devices, as shares, or the MAE in deviations of numbers.
        macro_f1: pooled over their samples. bytes, joules, flops and the other keys after them: spent by all devices
        from the first round to this one.
        """
        return [
            {"label": self.label, "method": self.method, "seed": self.seed, "round": point.round, "of": kind,
             **scores, **point.spent}
            for point in self.finished.points for kind, scores in point.scores.items()
        ]


def simulate(
    experiment: str | Path | Mapping[str, Any], out: str | Path, *, jobs: int = 0, device: str = "auto",
    on_round: Callable[[str, Mapping[str, Any]], None] = lambda run, row: None,
) -> list[Run]:
    """Runs every method, value of a grid and seed of an experiment. The same call goes on with what was interrupted.

    Args:
        experiment: a TOML file (docs/laboratory.md), or its tables as a mapping.
        out: the folder of the runs, one below it for each.
        jobs: processes, 0 for one per core. They are spawned: in a script, call this below
            ``if __name__ == "__main__":``.
        device: cpu, cuda or auto.
        on_round: called with the run's name and the figures of each closed round.

    Raises ConfigError with all mistakes of the experiment, and RoundError that names the runs that failed.
    """
    from cloud_server.laboratory.plan import experiment as experiments
    from cloud_server.laboratory.run import simulate as simulation

    asked = experiments.read(experiment) if isinstance(experiment, Mapping) else experiments.load(Path(experiment))
    simulation.simulate(asked, Path(out), simulation.Options(jobs=jobs, device=device), on_round=on_round)
    return read_runs(*(Path(out) / run.name for run in experiments.runs(asked)))


def read_runs(*places: str | Path) -> list[Run]:
    """The runs in ``places`` that have ended. A place is a folder of runs, the folder of a run, a fleet or a demo, or a
    result.json. Raises ConfigError where there is none, StateError for a file that is no result."""
    from cloud_server.laboratory.compare import finished_runs

    found, _ = finished_runs.gather([Path(place) for place in places])
    return [Run(one) for one in found]


def compare(
    runs: Sequence[Run], out: str | Path | None = None, *, targets: Sequence[float] = (), baseline: str | None = None,
    mixed: bool = False, target_of: str = "accuracy",
) -> Row:
    """Mean and spread over seeds by label, and what it costs to reach a target, as in compare.json.

    Args:
        out: also writes compare.html, curves.png, tables.csv and compare.json to this folder.
        targets: values of ``target_of``, as shares; default: those of the experiments, or what the runs reached.
        baseline: label of the run that gains are computed over; default: Per-FedAvg.
        mixed: allow runs of different data or models.
        target_of: accuracy (mean over the devices that train) or macro-f1 (pooled); of a task without classes error,
            micro-f1, auroc or difference.

    Raises ConfigError for runs that cannot be compared.
    """
    from cloud_server.laboratory.compare import comparison, comparison_files

    if target_of not in comparison.TARGETS_OF:
        raise ValueError(f"target_of is one of {', '.join(comparison.TARGETS_OF)}, not {target_of!r}")
    compared = comparison.compare([run.finished for run in runs], targets=targets, baseline=baseline, mixed=mixed,
                                  target_of=target_of)
    if out is not None:
        comparison_files.write(compared, Path(out))
    return comparison.to_json(compared)


class Fleet:
    """A fleet's folder, whether its aggregator runs or not: what its ledger says, as rows. Nothing is written.

    Raises ConfigError for a folder that is no fleet's.
    """

    def __init__(self, folder: str | Path):
        from cloud_server.records.fleet_folder import Fleet as Folder

        self._folder = Folder.load(Path(folder))

    @property
    def name(self) -> str:
        return self._folder.config.fleet.name

    @property
    def method(self) -> str:
        return self._folder.method.name

    @property
    def running(self) -> bool:
        """Whether an aggregator works on the folder now."""
        return self._folder.running()

    def rounds(self) -> list[Row]:
        """The closed rounds: loss, accuracy and its spread over devices, macro_f1, bytes up and down by counter
        (payload, MQTT, wire), joules, seconds. Nested figures have names with dots."""
        from cloud_server.results import result

        with self._ledger() as ledger:
            return [_flat(result.plain(one)) for one in result.round_figures(ledger)]

    def devices(self) -> list[Row]:
        """One row for each device that was ever enrolled. first_seen, last_seen: Unix seconds."""
        from fleet_core.base import schema

        with self._ledger() as ledger:
            return [_flat(schema.plain(one)) for one in ledger.devices()]

    def evaluations(self) -> list[Row]:
        """Accuracy, macro-F1 and calibration error of each device on its own test samples, by round and stage (before,
        fine_tuned, after personalization); of a fleet that predicts numbers ``mae.OUTPUT`` and ``r2.OUTPUT``; of
        one with several labels ``micro_f1.all``, ``macro_f1.all``, ``exact_match.all`` and ``f1.LABEL``."""
        from cloud_server.ledger.ledger_tables import Evaluation, TaskEvaluation
        from cloud_server.results import result

        with self._ledger() as ledger:
            return [
                {"round": one.round, "device": one.device, "stage": one.stage, "method": one.method, "new": one.new,
                 **(_flat(score.measures) if (score := result.task_score([one])) else {})}
                for one in ledger.each(TaskEvaluation)
            ] + [
                {"round": one.round, "device": one.device, "stage": one.stage, "new": one.new,
                 **result.plain(result.score_of(one))}
                for one in ledger.each(Evaluation)
            ]

    def updates(self) -> list[Row]:
        """Every update that arrived: its device and round, loss, samples, bytes, and whether it was counted."""
        from cloud_server.ledger.ledger_tables import Update
        from fleet_core.base import schema

        with self._ledger() as ledger:
            return [_flat(schema.plain(one)) for one in ledger.each(Update)]

    def costs(self) -> list[Row]:
        """The bill by device: bytes by counter and kind, operations, joules by phase, CPU seconds, memory."""
        from cloud_server.results import device_costs, result

        with self._ledger() as ledger:
            return [_flat(result.plain(one)) for one in device_costs.of_ledger(ledger)]

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        from cloud_server.ledger.ledger import Ledger

        with Ledger(self._folder.ledger_path, create=False) as ledger:
            yield ledger


def _flat(value: Mapping[str, Any], before: str = "") -> Row:
    """Keys of nested tables joined by dots; without what is None."""
    found: Row = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found |= _flat(item, f"{before}{key}.")
        elif item is not None:
            found[f"{before}{key}"] = item
    return found
