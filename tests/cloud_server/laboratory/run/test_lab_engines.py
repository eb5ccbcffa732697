"""A run's results are the same whether this process, worker processes or Ray compute it; and processes that die."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run import device_work
from cloud_server.laboratory.run.device_work import Setting
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.executors import Executor, Processes, RayExecutor
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.laboratory.run.simulate import Options, simulate, small_images
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError, RoundError
from tests.support import lab
from tests.support.inprocess import Killed
from tests.support.programs import descendants
from tests.support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("torch_threads")]

NEEDS_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: the extra 'ray'")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="waits on process descriptors")
DEVICES = tuple(f"d{n}" for n in range(5))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lab.recordings(tmp_path_factory.mktemp("data") / "all.npz", len(DEVICES))


# One run, other workers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(data: Path) -> Experiment:
    """Five devices, four per round: two tasks of two, side by side."""
    return lab.experiment(data, codec_up="int8", cohort=4)


def setting(asked: Experiment, folder: Path) -> Setting:
    return Setting(asked, experiments.runs(asked)[0], folder, side_by_side=2)


@pytest.fixture(scope="module")
def wanted(asked: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("wanted")
    return lab.comparable(lab.run_first(asked, folder, side_by_side=2), DEVICES)


def go_on_after_a_death(
    asked: Experiment, folder: Path, executor: Executor, kill: Callable[[], object], says: str
) -> dict[str, Any]:
    """A worker is killed after the second round: the run ends with a reason and continues in this process."""
    rows: list[Any] = []

    def on_round(row: Any) -> None:
        rows.append(row)
        if len(rows) == 2:
            kill()

    with pytest.raises(RoundError, match=says) as caught:
        lab.run_first(asked, folder, executor=executor, told=on_round)
    assert "continues this run" in str(caught.value)
    assert len(rows) == 2
    return lab.comparable(lab.run_first(asked, folder, side_by_side=2), DEVICES)


def test_processes_give_what_one_gives_and_a_run_continues_after_the_death_of_one(
    tmp_path: Path, asked: Experiment, wanted: Any
) -> None:
    executor = Processes(setting(asked, tmp_path / "whole"), 2)
    assert lab.comparable(lab.run_first(asked, tmp_path / "whole", executor=executor), DEVICES) == wanted
    executor.close()
    executor = Processes(setting(asked, tmp_path / "died"), 2)

    def kill() -> None:
        os.kill(next(iter(executor._pool._processes)), signal.SIGKILL)
        until(lambda: executor._pool._broken)  # otherwise the other worker may finish before it is noticed

    assert go_on_after_a_death(asked, tmp_path / "died", executor, kill, "a process died while it worked") == wanted
    executor.close()


@NEEDS_RAY
def test_ray_gives_what_one_process_gives_and_a_run_continues_after_the_death_of_an_actor(
    tmp_path: Path, asked: Experiment, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # Ray would write a token into the user's home
    try:
        executor = RayExecutor(setting(asked, tmp_path / "whole"), 2)
        assert lab.comparable(lab.run_first(asked, tmp_path / "whole", executor=executor), DEVICES) == wanted
        executor.close()
        executor = RayExecutor(setting(asked, tmp_path / "died"), 2)

        def dead() -> bool:
            try:
                ray.get(executor._actors[0].__ray_ready__.remote(), timeout=1)
            except ray.exceptions.RayActorError:
                return True
            except ray.exceptions.GetTimeoutError:
                pass
            return False

        def kill() -> None:
            ray.kill(executor._actors[0])
            until(dead)  # otherwise it may do its part of one more round

        found = go_on_after_a_death(asked, tmp_path / "died", executor, kill, "an actor of the Ray cluster died")
        assert found == wanted
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    finally:
        ray.shutdown()


def test_a_missing_ray_is_named(tmp_path: Path, asked: Experiment, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed") as caught:
        RayExecutor(setting(asked, tmp_path), 2)
    assert caught.value.hint == 'pip install "metafleet[ray]"'


def test_a_batch_of_small_images_is_trained_with_those_of_other_clients() -> None:
    hyper = METHODS["per-fedavg-exact"].hyper(support_batch=10, query_batch=10)
    assert small_images((3, 16, 16), hyper)
    assert not small_images((3, 28, 28), hyper)
    assert not small_images((3, 16, 16), METHODS["fedavg"].hyper(batch=50))
    assert not small_images((3, 16), hyper)


def test_a_task_is_a_fixed_group_of_devices_side_by_side(
    tmp_path: Path, asked: Experiment, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fleet_core.learning import local_training

    sizes: list[int] = []
    whole = local_training.train_side_by_side

    def counted(*arguments: Any, **more: Any) -> Any:
        sizes.append(len(arguments[4]))
        assert more["padded"], "mlp takes every sample by itself"
        return whole(*arguments, **more)

    monkeypatch.setattr(local_training, "train_side_by_side", counted)
    assert lab.comparable(lab.run_first(asked, tmp_path, side_by_side=2), DEVICES) == wanted
    assert sizes == [2, 2] * 4


# Several runs ---------------------------------------------------------------------------------------------------------


FEDAVG = {"name": "fedavg", "hyper": {"local_steps": 2, "batch": 12}}


def grid(data: Path, **more: Any) -> Experiment:
    methods = [FEDAVG, {"name": "pfldyn-proto", "hyper": lab.EPISODES}]
    return experiments.read({**lab.settings(data), "method": methods, **more})


def ended(folder: Path) -> dict[str, Any]:
    """Everything below an experiment's folder, without times."""
    found: dict[str, Any] = {"experiment": (folder / "experiment.json").read_bytes()}
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        result = Store(run).result()
        rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result["rounds"]]
        found[run.name] = {k: v for k, v in result.items() if k != "seconds"} | {"rounds": rows}
        found[run.name + " lines"] = lab.rounds_without_times(Store(run)) == rows
        found[run.name + " server"] = lab.server_state(Store(run))
    return found


def test_runs_in_processes_of_their_own_give_what_one_after_the_other_gives(tmp_path: Path, data: Path) -> None:
    asked = grid(data)
    one = simulate(asked, tmp_path / "one", Options(jobs=1))
    seen: list[tuple[str, int]] = []
    two = simulate(asked, tmp_path / "two", Options(jobs=2), on_round=lambda run, row: seen.append((run, row["round"])))
    assert [path.name for path in one] == [path.name for path in two] == ["fedavg-s0", "pfldyn-proto-s0"]
    assert ended(tmp_path / "one") == ended(tmp_path / "two")
    assert sorted(seen) == [(run, number) for run in ("fedavg-s0", "pfldyn-proto-s0") for number in (1, 2, 3, 4)]


def test_a_run_that_fails_does_not_end_the_others(tmp_path: Path, data: Path) -> None:
    wild = {"local_steps": 9, "batch": 12, "client_lr": 1e6, "clip_norm": 0}
    asked = grid(data, method=[{"name": "fedavg", "label": "wild", "hyper": wild}, FEDAVG])
    with pytest.raises(RoundError, match=r"^wild-s0: round \d: no update counts: the loss is (nan|inf)") as caught:
        simulate(asked, tmp_path / "out", Options(jobs=1))
    assert caught.value.hint == "the other runs have ended"
    assert [Store(tmp_path / "out" / name).done for name in ("wild-s0", "fedavg-s0")] == [False, True]


def test_what_has_ended_is_not_done_again_and_a_method_can_be_added(tmp_path: Path, data: Path) -> None:
    said, seen = list[str](), list[str]()
    simulate(grid(data, method=[FEDAVG]), tmp_path, Options(jobs=1))
    simulate(grid(data), tmp_path, Options(jobs=1), say=said.append, on_round=lambda run, row: seen.append(run))
    assert said == ["1 of 2 runs have ended before"]
    assert set(seen) == {"pfldyn-proto-s0"}
    assert not list(tmp_path.glob("*/clients"))


@pytest.mark.parametrize("change", [{"cohort": 3}, {"budget": {"rounds": 5}}, {"codec_up": "int8"}])
def test_another_experiment_in_the_same_folder_is_refused_before_anything_is_written(
    tmp_path: Path, data: Path, change: dict[str, Any]
) -> None:
    simulate(grid(data, method=[FEDAVG]), tmp_path, Options(jobs=1))
    before = ended(tmp_path)
    with pytest.raises(ConfigError, match=f"holds another experiment: {next(iter(change))} differ"):
        simulate(grid(data, **change), tmp_path, Options(jobs=1))
    other = {"name": "fedavg", "hyper": {"local_steps": 3, "batch": 12}}
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        simulate(grid(data, method=[other]), tmp_path, Options(jobs=1))
    assert ended(tmp_path) == before


def test_a_stopped_experiment_continues_to_the_same_result(tmp_path: Path, data: Path) -> None:
    asked, rows = grid(data), list[str]()
    simulate(asked, tmp_path / "whole", Options(jobs=1))
    with pytest.raises(Stopped):
        simulate(asked, tmp_path / "stopped", Options(jobs=1), on_round=lambda run, row: rows.append(run),
                 stopped=lambda: len(rows) == 6)
    assert rows == ["fedavg-s0"] * 4 + ["pfldyn-proto-s0"] * 2
    simulate(asked, tmp_path / "stopped", Options(jobs=1))
    assert ended(tmp_path / "stopped") == ended(tmp_path / "whole")


def test_a_run_killed_at_its_very_end_ends_again_and_leaves_no_states(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = lab.experiment(data)
    simulate(asked, tmp_path / "whole", Options(jobs=1))

    def killed(store: Store, result: Any) -> None:
        raise Killed

    monkeypatch.setattr(Store, "end", killed)
    with pytest.raises(Killed):
        simulate(asked, tmp_path / "killed", Options(jobs=1))
    monkeypatch.undo()
    simulate(asked, tmp_path / "killed", Options(jobs=1))
    assert ended(tmp_path / "killed") == ended(tmp_path / "whole")
    assert not list(tmp_path.glob("*/*/clients"))


MANY = """\
import sys
from pathlib import Path
from cloud_server.laboratory.plan import experiment
from cloud_server.laboratory.run import simulate
if __name__ == "__main__":
    asked = experiment.load(Path(sys.argv[1]), [sys.argv[4]])
    simulate.simulate(asked, Path(sys.argv[2]), simulate.Options(jobs=int(sys.argv[3])),
                      on_round=lambda run, row: print(run, row["round"], flush=True))
"""


@LINUX
@pytest.mark.parametrize(("runs", "processes"), [(2, 2), (1, 2)])
def test_a_killed_simulation_leaves_no_process_and_continues_to_the_same_bits(
    tmp_path: Path, data: Path, runs: int, processes: int
) -> None:
    """Two runs in one process each, and one run with two processes for its devices, whose model trains one device at a
    time."""
    path, rounds = tmp_path / "lab.toml", 12
    path.write_text(toml(data, rounds, "mlp" if runs > 1 else "fleet_core.learning.architectures:Mlp"))
    seeds = f"seeds={list(range(runs))}"
    command = [sys.executable, "-c", MANY, str(path), str(tmp_path / "out"), str(processes), seeds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            if line.split()[1] == "3":
                break
        children = [os.pidfd_open(pid) for pid in descendants(parent.pid) if pid != parent.pid]
        parent.kill()
    assert len(children) >= processes
    poll = select.poll()
    for child in children:
        poll.register(child, select.POLLIN)
        assert poll.poll(1000 * PATIENCE_S), "a process has outlived its parent"
        poll.unregister(child)
        os.close(child)
    asked = experiments.load(path, [seeds])
    simulate(asked, tmp_path / "out", Options(jobs=1))
    simulate(asked, tmp_path / "whole", Options(jobs=1))
    assert ended(tmp_path / "out") == ended(tmp_path / "whole")


def toml(data: Path, rounds: int, model: str = "mlp") -> str:
    return f"""\
cohort = 4
codec_up = "int8"
[data]
path = "{data}"
[model]
name = "{model}"
options = {{hidden = [6]}}
[partition.options]
split = "time"
[budget]
rounds = {rounds}
[[method]]
name = "pfldyn-proto"
hyper = {{local_steps = 2, support_batch = 12, query_batch = 12}}
"""


def test_what_a_gpu_computes_is_repeatable_and_in_whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    backends = torch.backends
    before = backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        device_work.repeatable()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not any((backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32))
    finally:
        torch.use_deterministic_algorithms(False)
        backends.cudnn.benchmark, backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = before
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]
