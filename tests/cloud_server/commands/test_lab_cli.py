"""simulate, compare and advise as commands, and the page that describes them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloud_server.commands import cli, lab
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.run_progress import Progress
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config, processes
from fleet_core.data.partitions import PARTITIONS, Newcomers
from fleet_core.learning.architectures import MODELS
from fleet_core.model.select_arrays import TrainSection
from fleet_core.robust.settings import RobustSection
from tests.cloud_server.laboratory.advise.test_advise import written
from tests.cloud_server.laboratory.compare.test_compare import ended
from tests.support.cli import Run, runner
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "laboratory.md").read_text(encoding="utf-8")

SMALL = """
seeds = [0, 1]
[data]
path = "{data}"
[model]
name = "mlp"
options = {{ hidden = [8] }}
[budget]
rounds = 4
[evaluation]
every = 2
new_devices = 0.2
[[method]]
name = "per-fedavg-fo"
hyper = {{ local_steps = 2 }}
[[method]]
name = "p-avg-proto"
hyper = {{ local_steps = 2 }}
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("METAFLEET_WITH_PARENT", raising=False)
    return runner(monkeypatch, capsys, "metafleet", cli.main)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An experiment of four runs that takes a second."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(data=written(tmp_path / "mine.npz")))
    return path


# simulate -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulate_runs_compares_and_prints_its_table_again_without_torch(
    run: Run, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run("simulate", small, "--out", tmp_path / "out", "--jobs", 1)
    assert first.code == 0
    head, _, *lines = first.out.splitlines()
    assert re.split(r"  +", head.strip())[:3] == ["seeds", "accuracy", "worst device"]
    assert [line.split()[1] for line in lines[:2]] == ["2", "2"]
    assert {line.split()[0] for line in lines[:2]} == {"per-fedavg-fo", "p-avg-proto"}
    assert "p-avg-proto-s1  round 4/4  loss " in first.err
    results = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/result.json")}
    assert results.keys() == {f"{name}-s{seed}" for name in ("per-fedavg-fo", "p-avg-proto") for seed in (0, 1)}
    assert [row["round"] for row in results["p-avg-proto-s0"]["rounds"] if "accuracy" in row] == [2, 4]
    for other in (["--device", "cuda"], ["--set", "evaluation.every=1"]):
        assert run("simulate", small, "--out", tmp_path / "out", *other).code == 2
    monkeypatch.setitem(sys.modules, "cloud_server.laboratory.run.simulate", None)
    monkeypatch.delattr("cloud_server.laboratory.run.simulate")
    again = run("simulate", small, "--out", tmp_path / "out")
    assert (again.code, again.out) == (0, first.out)

    compared = run("compare", tmp_path / "out", "--out", tmp_path / "compared", "--target", "0.2", "--json")
    found = json.loads(compared.out)
    assert found["baseline"] == "per-fedavg-fo"
    assert found["files"] == [str(tmp_path / "compared" / name) for name in
                              ("compare.html", "curves.png", "tables.csv", "compare.json")]  # fmt: skip
    assert all(Path(path).stat().st_size > 1000 for path in found["files"])
    written_json = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert written_json == {key: value for key, value in found.items() if key != "files"}
    wrong = run("compare", tmp_path / "out", "--out", tmp_path / "other", "--target-of", "f1")
    known = "expected one of accuracy, error, micro-f1, auroc, difference, macro-f1"
    assert (wrong.code, known in " ".join(wrong.err.split())) == (2, True)


def test_a_dry_run_lists_the_runs_and_computes_nothing(run: Run, small: Path, tmp_path: Path) -> None:
    changed = ["--set", "method.1.hyper.client_lr=1"]
    found = json.loads(run("simulate", small, "--out", tmp_path / "out", "--dry-run", "--json", *changed).out)
    assert [(one["run"], one["state"], one["hyper"]) for one in found["runs"]] == [
        ("per-fedavg-fo-s0", "to do", "local_steps=2"), ("per-fedavg-fo-s1", "to do", "local_steps=2"),
        ("p-avg-proto-s0", "to do", "local_steps=2 client_lr=1.0"),
        ("p-avg-proto-s1", "to do", "local_steps=2 client_lr=1.0"),
    ]  # fmt: skip
    assert (found["devices"], found["new_devices"], found["cohort"], found["rounds"]) == (5, 1, 5, 4)
    assert found["parameters"] == 8 * 5 + 3 * 9
    assert not (tmp_path / "out").exists()
    ran = run("simulate", small, "--out", tmp_path / "out", "--dry-run")
    assert "5 devices that train, 5 asked a round; 1 new ones" in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "budget.round=3"], "budget.round: unknown key (did you mean 'rounds'?)"),
        (["--set", "cohort=99"], "a cohort of 99 out of 5 devices"),
        (["--set", "model={name='cnn1d'}"], "it takes series [C, T], not samples of shape [4]"),
        (["--engine", "rai"], "--engine: unknown value 'rai' (did you mean 'ray'?)"),
        (["--device", "gpu"], "--device: unknown value 'gpu'"),
        (["--set", "board=raspberry-pi-4"], "unknown board 'raspberry-pi-4' (did you mean 'raspberry-pi-4b'?)"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_an_experiment_that_cannot_work_is_refused_before_the_first_round(
    run: Run, small: Path, tmp_path: Path, arguments: list[str], said: str, dry: bool
) -> None:
    ran = run("simulate", small, "--out", tmp_path / "out", *arguments, *(["--dry-run"] if dry else []))
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_of_another_experiment_is_refused(run: Run, small: Path, tmp_path: Path) -> None:
    run("simulate", small, "--out", tmp_path / "out", "--jobs", 1, "--set", "seeds=[0]")
    for more in ([], ["--dry-run"]):
        ran = run("simulate", small, "--out", tmp_path / "out", "--set", "seeds=[0]", "--set", "budget.rounds=5", *more)
        assert ran.code == 2
        assert "hint: give another --out" in ran.err


def test_a_run_that_fails_is_named_after_the_table_of_the_others(run: Run, small: Path, tmp_path: Path) -> None:
    ran = run("simulate", small, "--out", tmp_path / "out", "--jobs", 1, "--set", "seeds=[0]",
              "--set", "method.0.hyper.client_lr=1000000", "--set", "method.0.hyper.clip_norm=0")  # fmt: skip
    assert ran.code == 1
    assert "p-avg-proto" in ran.out
    assert "per-fedavg-fo" not in ran.out
    assert "error: per-fedavg-fo-s0: " in ran.err


@pytest.mark.slow
def test_ctrl_c_ends_in_order_and_the_same_command_continues(run: Run, small: Path, tmp_path: Path) -> None:
    many = ["simulate", small, "--out", tmp_path / "out", "--jobs", "1", "--set", "seeds=[0]", "--set",
            "budget.rounds=400", "--set", "evaluation.every=1"]  # fmt: skip
    with subprocess.Popen([sys.executable, "-m", "cloud_server.commands.cli", *map(str, many)], stderr=subprocess.PIPE,
                          text=True, env={**os.environ, "NO_COLOR": "1"}) as child:  # fmt: skip
        assert child.stderr is not None
        for line in child.stderr:
            if "round   3/400" in line:
                child.send_signal(signal.SIGINT)
                break
        rest = child.stderr.read()
    assert child.returncode == processes.INTERRUPTED
    assert "stopped; nothing is lost: the same command continues" in rest
    ran = run(*many, "--dry-run", "--json")
    assert re.fullmatch(r"\d+ rounds done", json.loads(ran.out)["runs"][0]["state"])


# Progress -------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(progress: Progress, run: str, number: int, accuracy: float | None = None) -> None:
    evaluated = {} if accuracy is None else {"accuracy": {"mean": accuracy}}
    progress.round_ended(run, {"round": number, "loss": 0.5, **evaluated})


def test_plain_lines_come_for_evaluated_rounds_and_every_ten_seconds() -> None:
    stream, now = io.StringIO(), [0.0]
    with Progress(["a-s0", "b-s0"], 20, stream, lambda: now[0]) as progress:
        for number in range(1, 16):
            report(progress, "a-s0", number, 0.75 if number == 4 else None)
            now[0] += 1.0
    assert stream.getvalue().splitlines() == [
        "a-s0  round  1/20  loss 0.500",
        "a-s0  round  4/20  loss 0.500  accuracy 0.750  about 36.0 s left",
        "a-s0  round 14/20  loss 0.500  accuracy 0.750 in round 4  about 26.0 s left",
    ]


def test_the_expected_end_counts_what_a_run_did_before() -> None:
    now = [0.0]
    progress = Progress(["a-s0"], 100, io.StringIO(), lambda: now[0])
    report(progress, "a-s0", 91)
    assert progress.remaining() == ""
    now[0] = 2.0
    report(progress, "a-s0", 92)
    assert progress.remaining() == "about 16.0 s left"
    report(progress, "a-s0", 100)
    assert progress.remaining() == ""


def test_on_a_terminal_a_table_follows_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream, now = Terminal(), [0.0]
    with Progress(["a-s0", "b-s0"], 9, stream, lambda: now[0]) as progress:
        for run in ("a-s0", "b-s0"):
            now[0] += 1.0
            report(progress, run, 3, 0.625)
        progress.say("a word \x1b[31m")
        report(progress, "a-s0", 9)
    shown = stream.getvalue()
    assert "0 of 2 runs ended  about 12.0 s left" in shown
    assert "3/9" in shown
    assert "0.625" in shown
    assert "1 of 2 runs ended" in shown.rpartition("a word ?")[2]


# compare and advise ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compare_says_what_it_left_out_and_refuses_what_is_mixed(run: Run, tmp_path: Path) -> None:
    ended(tmp_path / "a", "fedavg", [0.5])
    (tmp_path / "a" / "prox-s0").mkdir()
    (tmp_path / "a" / "prox-s0" / "run.json").write_text("{}")
    ran = run("compare", tmp_path / "a", "--out", tmp_path / "out")
    assert (ran.code, "note: " in ran.err, "to 0.5" in ran.out) == (0, True, True)
    ended(tmp_path / "b", "fedrep", [0.5], data={"set": "mnist"})
    ran = run("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "two")
    assert (ran.code, (tmp_path / "two").exists()) == (2, False)
    assert run("compare", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "two", "--mixed").code == 0


@pytest.mark.slow
def test_a_fleet_is_compared_from_its_ledger(run: Run, finished: Path, tmp_path: Path) -> None:
    found = json.loads(run("compare", finished / "fleet", "--out", tmp_path / "out", "--json").out)
    (entry,) = found["entries"]
    assert (entry["label"], entry["kind"], entry["spent"]["rounds"]["mean"]) == ("pfldyn-proto", "fleet", 2)
    assert 0 < entry["final"]["devices"]["mean"]["mean"] <= 1
    assert entry["spent"]["payload_bytes"]["mean"] > 1000


def test_compare_without_matplotlib_says_what_to_install_and_writes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(tmp_path / "a", "fedavg", [0.5])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    ran = run("compare", tmp_path / "a", "--out", tmp_path / "out")
    assert (ran.code, (tmp_path / "out").exists()) == (2, False)
    assert 'hint: pip install "metafleet[lab]"' in ran.err


def test_a_report_of_a_simulation_points_to_compare(run: Run, tmp_path: Path) -> None:
    place = ended(tmp_path, "fedavg", [0.5])
    ran = run("report", place, "--out", tmp_path / "page.html")
    assert ran.code == 1
    assert f"hint: metafleet compare {place} --out FOLDER" in ran.err


def test_advise_refuses_data_that_cannot_be_evaluated(run: Run, tmp_path: Path) -> None:
    ran = run("advise", written(tmp_path / "mine.npz", clients=2), "--out", tmp_path / "out")
    assert (ran.code, ran.out, (tmp_path / "out").exists()) == (2, "", False)
    assert "holds 2 clients, 2 with 20 samples or more; expected 4 such clients" in ran.err


@pytest.mark.slow
def test_advise_writes_its_advice_and_the_settings_of_a_fleet(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cloud_server.laboratory.run import simulate
    from tests.cloud_server.laboratory.advise.test_advise import Bench

    bench = Bench()

    def engine(asked: Experiment, out: Path, options: Any, **around: Any) -> list[Path]:
        around["say"]("warning: a word")
        return bench(asked, out, "")[0]

    monkeypatch.setattr(simulate, "simulate", engine)
    data = written(tmp_path / "mine.npz")
    ran = run("advise", data, "--out", tmp_path / "out", "--board", "raspberry-pi-4b")
    assert ran.code == 0
    assert ran.err.count("warning: a word") == 1
    assert "Take pfldyn-proto with mlp, ternary on the wire." in ran.out
    assert "joules on raspberry-pi-4b are not known (" in ran.out
    assert f"metafleet init FLEET --data {data} --method pfldyn-proto --model mlp" in ran.out
    facts = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert facts["chosen"]["method"] == "pfldyn-proto"
    assert "Take pfldyn-proto with mlp, ternary on the wire." in facts["sentences"]
    again = run("advise", data, "--out", tmp_path / "out", "--board", "raspberry-pi-4b", "--json")
    assert json.loads(again.out)["ranked"] == facts["ranked"]
    assert [one["codec"] for one in facts["coded"]] == ["int8", "int4", "ternary", "topk-10"]
    other = run("advise", data, "--out", tmp_path / "other", "--codecs", "topk-1/int4", "--json")
    assert [one["codec"] for one in json.loads(other.out)["coded"]] == ["topk-1/int4"]
    without = run("advise", data, "--out", tmp_path / "without", "--codecs", "none", "--json")
    assert json.loads(without.out)["coded"] == []
    fleet = config.load(FleetConfig, tmp_path / "out" / "fleet" / "fleet.toml")
    assert (fleet.fleet.method, fleet.model.classes) == ("pfldyn-proto", ("a", "b", "c"))


@pytest.mark.parametrize(("asked", "wrong"), [("int8,topk10", "topk10"), ("int4/it8", "it8"), ("", "")])
def test_advise_refuses_an_unknown_codec_before_it_runs(run: Run, tmp_path: Path, asked: str, wrong: str) -> None:
    ran = run("advise", written(tmp_path / "mine.npz"), "--out", tmp_path / "out", "--codecs", asked)
    assert (ran.code, (tmp_path / "out").exists()) == (2, False)
    assert f"--codecs: unknown codec '{wrong}'" in ran.err
    assert "or UP/DOWN; or none" in ran.err


def test_the_commands_are_there_and_datasets_are_listed(run: Run) -> None:
    names = {row["name"] for row in json.loads(run("datasets", "--json").out)}
    assert {"heartbeat", "mnist"} <= names
    for command in (lab.simulate, lab.compare, lab.advise):
        assert f"metafleet {command.__name__}" in run(command.__name__, "--help").out


# The page -------------------------------------------------------------------------------------------------------------


def keys() -> set[str]:
    """Every key of an experiment file, as ``section.key``."""
    found = set()
    for part in dataclasses.fields(Experiment):
        section = {"data": experiments.DataSection, "partition": experiments.PartitionSection,
                   "model": experiments.ModelSection,
                       "evaluation": experiments.EvaluationSection, "budget": experiments.Budget,
                   "method": experiments.MethodSection, "train": TrainSection,
                   "robust": RobustSection, "privacy": experiments.SimulatedPrivacySection}.get(part.name)  # fmt: skip
        found |= {f"{part.name}.{f.name}" for f in dataclasses.fields(section)} if section else {part.name}
    return found


def rows(heading: str) -> dict[str, list[str]]:
    """{first cell: other cells} of all tables between the page's ``heading`` and the next heading of its level."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()
             if line.startswith("| `")]  # fmt: skip
    return {cell[0].strip("`"): cell[1:] for cell in cells}


def test_the_page_has_every_key_of_the_file_and_no_other() -> None:
    assert set(rows("The file, key by key")) == keys() | set(PARTITIONS)


def test_the_page_has_the_defaults_of_the_file() -> None:
    plain = experiments.read({"data": {"set": "x"}, "model": {"name": "x"}, "budget": {"rounds": 1},
                              "method": [{"name": "fedavg"}]})  # fmt: skip
    table = {key: cells[0].strip("`") for key, cells in rows("The file, key by key").items() if key in keys()}
    for key, text in table.items():
        if not text or text.startswith(("must", "the ", "its ")):
            continue
        *section, name = key.split(".")
        value = getattr(getattr(plain, section[0]) if section else plain, name)
        assert json.loads(text) == (list(value) if isinstance(value, tuple) else value), key
    assert sum(text[:1] in '0123456789["tf' and text != "" for text in table.values()) > 12


def test_the_page_has_every_partition_with_its_options_and_every_model() -> None:
    page = rows("The file, key by key")
    for name, partition in PARTITIONS.items():
        assert re.findall(r"`(\w+)`", page[name][0]) == [f.name for f in dataclasses.fields(partition.options)], name
    assert set(MODELS) <= set(re.findall(r"`([\w-]+)`", page["model.name"][1]))
    assert re.findall(r"`(\w+)`", page["evaluation.novel"][1]) == [f.name for f in dataclasses.fields(Newcomers)]


def test_the_pages_experiment_can_be_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "first.toml").write_text(PAGE.partition("```toml\n")[2].partition("```")[0])
    ran = run("simulate", tmp_path / "first.toml", "--out", tmp_path / "out", "--dry-run", "--json")
    found = json.loads(ran.out)
    assert {one["label"] for one in found["runs"]} == {
        "per-fedavg-fo", "pfldyn-proto,penalty=0.1", "pfldyn-proto,penalty=0.5"}
    assert (found["devices"], found["new_devices"]) == (8, 2)
