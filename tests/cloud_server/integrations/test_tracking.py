"""TensorBoard and MLflow: what the real packages read back, each round once, and trackers that fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cloud_server.commands import cli
from cloud_server.integrations import tracking
from cloud_server.integrations.tracking import FleetSource, Follower, MLflow, Options, RunSource, TensorBoard
from cloud_server.ledger.ledger import Ledger
from fleet_core.base.errors import ConfigError
from tests.cloud_server.laboratory.advise.test_advise import written
from tests.support.brokers import free_port
from tests.support.cli import runner
from tests.support.programs import Programs, metafleet


@pytest.fixture
def fleet(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "fleet", tmp_path / "fleet"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A simulated run's folder with two rounds and a line that is being written."""
    folder = tmp_path / "out" / "fedavg-0"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"method": "fedavg", "seed": 0, "hyper": {"client_lr": 0.1},
                                                 "experiment": {"name": "first", "cohort": None, "sizes": [6, 8]}}))
    add(folder, 1, 2)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')
    return folder


def add(folder: Path, *numbers: int) -> None:
    """Rounds as a simulation writes them, in place of an unfinished line."""
    path = folder / "rounds.jsonl"
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    rows = [{"round": number, "loss": 1.0 / number, "payload_bytes": {"up": 10 * number, "down": 5},
             "accuracy": {"mean": 0.75, "worst": 0.5}, "before": {"accuracy": {"mean": 0.25}},
             "energy_j": {"value": 2.0}} for number in numbers]
    path.write_text("\n".join([*whole, *map(json.dumps, rows), ""]))


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return found


def steps(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in events(folder).Scalars(tag)]


def look(source: Any, make: Any, *, last: bool = True) -> list[str]:
    """A start, a look and an end of the process; what it said."""
    said: list[str] = []
    Follower(source, "tracker", make, said.append).look(last=last)
    return said


def test_the_package_reads_a_runs_rounds_back_each_once(run: Path, tmp_path: Path) -> None:
    def board(source: Any) -> TensorBoard:
        return TensorBoard(str(tmp_path / "logs"), source)

    assert look(RunSource(run), board) == []
    at = tmp_path / "logs" / RunSource(run).name
    assert steps(at, "loss") == [(1, 1.0), (2, 0.5)]
    add(run, 3)
    assert look(RunSource(run), board) == look(RunSource(run), board) == []
    assert [number for number, _ in steps(at, "loss")] == [1, 2, 3]
    assert steps(at, "bytes/up") == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert steps(at, "accuracy/before")[0] == (1, 0.25)
    assert steps(at, "accuracy/after")[0] == (1, 0.75)
    assert steps(at, "joules")[0] == (1, 2.0)
    assert "_hparams_/session_start_info" in events(at).summary_metadata


def test_other_settings_are_another_run(run: Path) -> None:
    before = RunSource(run).name
    (run / "run.json").write_text('{"method": "fedavg", "seed": 1}')
    assert RunSource(run).name != before
    assert RunSource(run).name.startswith("fedavg-0-")


def test_a_fleets_last_round_is_written_at_the_end(fleet: Path, tmp_path: Path) -> None:
    source = FleetSource(fleet)
    assert [number for number, _, _ in source.rounds(0, last=False)] == [1]
    rounds = list(source.rounds(0, last=True))
    assert [number for number, _, _ in rounds] == [1, 2]
    assert rounds[0][2]["bytes/up"] > 0
    assert any("accuracy/after" in figures for _, _, figures in rounds)
    assert list(source.rounds(2, last=True)) == []
    assert source.settings()["fleet.rounds"] == 2


def test_figures_that_are_no_numbers_are_left_out(fleet: Path) -> None:
    with Ledger(fleet / "ledger.sqlite") as ledger:
        ledger._db.execute("UPDATE rounds SET loss = 9e999 WHERE round = 1")
        ledger._db.commit()
    (_, _, figures), *_ = FleetSource(fleet).rounds(0, last=True)
    assert "loss" not in figures
    assert "seconds" in figures


class Broken:
    """A tracker whose server is away until it is told to work."""

    def __init__(self) -> None:
        self.works = False
        self.rounds: list[int] = []

    def last(self) -> int:
        if not self.works:
            raise ConnectionError("refused\nand more")
        return max(self.rounds, default=0)

    def write(self, number: int, at_s: float, figures: Any) -> None:
        self.rounds.append(number)

    def close(self) -> None:
        pass


def test_a_tracker_that_fails_is_told_once_and_gets_what_it_missed(run: Path) -> None:
    tracker, said = Broken(), list[str]()
    follower = Follower(RunSource(run), "mlflow", lambda source: tracker, said.append)
    follower.look()
    follower.look()
    assert len(said) == 1
    assert "ConnectionError: refused" in said[0]
    add(run, 3)
    tracker.works = True
    follower.look()
    assert tracker.rounds == [1, 2, 3]


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'mlflow' is not installed") as caught:
        tracking.check(Options(mlflow="http://127.0.0.1:5000"))
    assert caught.value.hint == 'pip install "metafleet[mlflow]"'
    tracking.check(Options())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """MLflow's store of files, which needs no server and no database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


@pytest.mark.slow
def test_mlflow_reads_a_runs_rounds_back_each_once(run: Path, store: str) -> None:
    from mlflow.tracking import MlflowClient

    def make(source: Any) -> MLflow:
        return MLflow(store, source)

    assert look(RunSource(run), make) == []
    add(run, 3)
    assert look(RunSource(run), make) == look(RunSource(run), make) == []
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("first")
    assert experiment is not None
    found, = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((one.step, one.value) for one in history) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert found.data.metrics["accuracy/after"] == 0.75
    assert found.data.params == {"method": "fedavg", "seed": "0", "hyper.client_lr": "0.1", "experiment.name": "first",
                                 "experiment.sizes": "[6, 8]"}
    assert found.info.status == "FINISHED"


@pytest.mark.slow
def test_a_simulation_is_tracked_and_a_server_that_is_away_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("METAFLEET_WITH_PARENT", raising=False)
    experiment = tmp_path / "small.toml"
    experiment.write_text(f'[data]\npath = "{written(tmp_path / "mine.npz")}"\n[model]\nname = "mlp"\n'
                          '[budget]\nrounds = 3\n[[method]]\nname = "fedavg"\nhyper = { local_steps = 2 }\n')
    command = runner(monkeypatch, capsys, "metafleet", cli.main)
    options = ("--jobs", 1, "--tensorboard", tmp_path / "logs", "--mlflow", f"http://127.0.0.1:{free_port()}")
    for _ in range(2):  # the second goes on with a run that has ended
        assert command("simulate", experiment, "--out", tmp_path / "out", *options).code == 0
    board, = (tmp_path / "logs").iterdir()
    assert [number for number, _ in steps(board, "loss")] == [1, 2, 3]
    assert "mlflow, " in (tmp_path / "out" / "tracking.log").read_text()


@pytest.mark.slow
def test_an_aggregator_is_tracked(fleet: Path, tmp_path: Path, programs: Programs) -> None:
    for _ in range(2):
        program = programs.start(*metafleet("server", "start", fleet, "--port", "0", "--until-done", "--quiet",
                                            "--tensorboard", tmp_path / "logs"))
        assert program.exit_code() == 0
        assert "tracking: tensorboard" in program.text()
    board, = (tmp_path / "logs").iterdir()
    assert [number for number, _ in steps(board, "round")] == [1, 2]
