"""A laboratory run computes what a fleet computes, and resumes where it was stopped."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.run_folder import Clients, Store
from cloud_server.ledger.ledger_tables import Evaluation, RoundArrays, RoundCodec, Traffic, Update
from cloud_server.results.result import round_figures
from edge_agent.device.state import DeviceState, read_state
from fleet_core.base import config
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.base.trees import Params
from fleet_core.board.limits import Limits
from fleet_core.model import choose_frozen
from fleet_core.model.choose_codec import WAYS
from fleet_core.robust.screening import LIMITS
from tests.support import lab
from tests.support.inprocess import World, config_text, toy, world
from tests.support.lab import EPISODES
from tests.support.liars import lie

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

PLAIN = {"local_steps": 3, "batch": 12}
TUNED = {**PLAIN, "finetune_steps": 2}
ONE_EPISODE = {**EPISODES, "local_steps": 1}
ROUNDS = 4
LOSS_OF_SOME = 0.8
LONG = os.environ.get("METAFLEET_LONG") == "1"


# The same as the fleet ------------------------------------------------------------------------------------------------


def run_fleet(
    folder: Path, method: str, hyper: dict[str, Any], codec: str, *, rounds: int = ROUNDS, devices: int = 3,
    hidden: int = 6, seed: int = 3, cohort: int = 2, skip_below: float = 0.0, train: dict[str, Any] | None = None,
    rule: str = "none", max_batch: int | None = None,
) -> World:
    """Runs a fleet until everything is counted and evaluated."""
    values = "\n".join(f"{name} = {json.dumps(value)}" for name, value in hyper.items() if name != "local_steps")
    text = config_text(
        method, rounds=rounds, hyper=values, devices=devices, fleet=f"cohort = {cohort}\nseed = {seed}",
        link=f'up = "{codec}"\ndown = "{codec}"\nskip_below = {skip_below}',
    )
    text = text.replace(f"serve_every = {rounds}", "serve_every = 2").replace("hidden = [6]", f"hidden = [{hidden}]")
    w = world(folder, f"{text}\n{config.toml({'train': train or {}, 'robust': {'rule': rule}})}")
    w.start_server()
    for n in range(devices):
        w.start_agent(f"d{n}", toy(n, shift=0.3 * n), train_fraction=0.6,
                      limits=Limits(True, max_batch=max_batch) if max_batch else None)

    def over() -> bool:
        evaluated = w.server.ledger.rows(Evaluation, round=rounds, stage="after")
        homes = (folder / "devices").iterdir()
        return len(evaluated) == devices and not any(DeviceState(home).pending() for home in homes)

    assert w.pump(over)
    return w


def fleet_server(w: World) -> dict[str, Params]:
    closed = w.server.checkpoint
    deltas = {f"{k:03}": np.frombuffer(one.data, np.uint8) for k, one in enumerate(closed.deltas)}
    state = {"model": closed.state.model, "served": closed.state.served, **closed.state.memory}
    return {**state, "published": closed.published, **({"deltas": {"data": deltas}} if deltas else {}),
            **({"robust": closed.robust} if closed.robust else {})}


def fleet_device(w: World, name: str) -> dict[str, bytes]:
    paths = list((w.folder / "devices" / name).glob("methods/*/state.safetensors"))
    return lab.flat(read_state(paths[0])) if paths else {}


def trimmed(state: dict[str, bytes]) -> dict[str, bytes]:
    """The state without the served model, which a fleet keeps in a separate file."""
    arrays = {name: value for name, value in state.items() if name != "metadata" and not name.startswith("answers/")}
    return {name.removeprefix("memory."): value for name, value in arrays.items()}


@pytest.mark.parametrize(
    ("method", "hyper", "codec", "skip_below"),
    [
        ("pfldyn-proto", EPISODES, "fp32", 0.0),
        ("pfldyn-proto", EPISODES, "int8", 0.0),
        ("fedper", PLAIN, "int8", 0.0),
        ("scaffold", TUNED, "int8-plain", 0.0),
        ("fedproto", PLAIN, "int8", 0.0),
        ("pfedhn", PLAIN, "int8", 0.0),
        ("pfedgp", EPISODES, "int8", 0.0),
        ("metavers", {**EPISODES, "shots": 0}, "int8", 0.0),
        ("pfldyn-proto", EPISODES, "int8-random", 0.0),
        ("pfldyn-proto", EPISODES, "topk-10", 0.0),
        ("scaffold", TUNED, "lowrank", 0.0),
        ("fedper", PLAIN, "int4", 0.0),
        ("pfldyn-proto", EPISODES, "auto", 0.0),
        ("p-avg-proto", EPISODES, "auto", 0.0),
        ("fedproto", PLAIN, "auto", 0.0),
        ("pfldyn-proto", EPISODES, "int8", 1.0),
        ("fedper", PLAIN, "fp32", 1.0),
        ("scaffold", TUNED, "int8-plain", 1.0),
        ("metavers", {**EPISODES, "shots": 0}, "int4", 1.0),
        ("pfldyn-proto", EPISODES, "auto", 1.0),
        ("fedproto", PLAIN, "int8", 1.0),
    ],
)
@pytest.mark.slow
def test_a_run_computes_what_a_fleet_of_real_agents_computes(
    tmp_path: Path, method: str, hyper: dict[str, Any], codec: str, skip_below: float
) -> None:
    compare_with_a_fleet(tmp_path, method, hyper, codec, skip_below=skip_below)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfldyn-proto", "per-fedavg-fo", "fedper"])
def test_under_a_boards_limit_a_run_computes_what_a_fleet_computes(tmp_path: Path, method: str) -> None:
    """A support of 4 and a query of 16 become 2 and 8 on both sides."""
    hyper = {"local_steps": 3, **({"batch": 20} if method == "fedper" else {"support_batch": 4, "query_batch": 16})}
    compare_with_a_fleet(tmp_path, method, hyper, "int8", max_batch=8)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["none", "clip", "median", "trimmed", "krum", "history"])
def test_with_a_liar_a_run_computes_what_a_fleet_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """Also the rule's memory, and the state of a device whose updates are refused."""
    lie(monkeypatch, {"d1": -100.0})
    store = compare_with_a_fleet(tmp_path, "pfldyn-proto", EPISODES, "int8", rule=rule, cohort=3)
    assert all(set(row["errors"]) == {"d1"} for row in store.rounds())
    assert all(row["participants"] == 2 for row in store.rounds())


@pytest.mark.slow
def test_a_loss_above_the_limit_is_refused_in_a_run_as_in_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "loss", LOSS_OF_SOME)
    store = compare_with_a_fleet(tmp_path, "pfldyn-proto", EPISODES, "int8", cohort=3)
    refused = [error for row in store.rounds() for error in row.get("errors", {}).values()]
    assert refused
    assert all(re.fullmatch(rf"loss [\d.]+, expected at most {LOSS_OF_SOME:g}", error) for error in refused)


FROZEN: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "the head of a shared model": ("fedavg", TUNED, "int8", {"only": ["head.*"]}),
    "a body of which a part moves": ("pfldyn-proto", EPISODES, "int8", {"only": ["layers.0.weight"]}),
    "without feedback": ("feddyn", TUNED, "int8-plain", {"only": ["layers.*"]}),
    "with controls beside the model": ("scaffold", TUNED, "int4", {"only": ["*.bias"]}),
    "through inner steps": ("per-fedavg-fo", EPISODES, "topk-10", {"only": ["head.*"]}),
    "moments of the server": ("fedmeta-maml", EPISODES, "fp32", {"only": ["*.weight"]}),
    "a head of one's own that does not move": ("fedper", PLAIN, "int8", {"only": ["layers.0.bias"]}),
    "by a schedule": ("pfldyn-proto", EPISODES, "int8", {"freeze": "auto"}),
    "by a schedule, with codecs by round": ("fedavg", TUNED, "auto", {"freeze": "auto"}),
    "by a schedule, with controls": ("scaffold", TUNED, "int8", {"freeze": "auto"}),
    "by a schedule within patterns": (
        "fedavg", {**TUNED, "server_optimizer": "adam", "server_lr": 0.05}, "int8",
        {"freeze": "auto", "only": ["*.weight"]},
    ),
    "by a schedule, with a personal head": ("fedper", PLAIN, "ternary", {"freeze": "auto"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FROZEN)
def test_a_run_that_trains_a_part_computes_what_a_fleet_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Constants are such that a schedule freezes, probes and thaws within ten rounds."""
    for name, value in {"WINDOW": 2, "SMALL": 0.9, "AGAIN": 0.7, "REST": 2}.items():
        monkeypatch.setattr(choose_frozen, name, value)
    method, hyper, codec, train = FROZEN[what]
    rounds = 10 if "freeze" in train else ROUNDS
    store = compare_with_a_fleet(tmp_path, method, hyper, codec, train=train, rounds=rounds)
    rows = [row["arrays"] for row in store.rounds()]
    frozen = {len(row["frozen"]) for row in rows}
    if "freeze" not in train:
        assert (len(frozen), {row["reason"] for row in rows}) == (1, {""})
        return
    assert len(frozen) > 1
    assert any("a probe of all arrays" in row["reason"] for row in rows)
    assert any("came to rest" in row["reason"] for row in rows)


def compare_with_a_fleet(
    tmp_path: Path, method: str, hyper: dict[str, Any], codec: str, *, rounds: int = ROUNDS,
    skip_below: float = 0.0, train: dict[str, Any] | None = None, rule: str = "none", cohort: int = 2,
    max_batch: int | None = None,
) -> Store:
    w = run_fleet(tmp_path / "fleet", method, hyper, codec, rounds=rounds, skip_below=skip_below, train=train,
                  rule=rule, cohort=cohort, max_batch=max_batch)
    first = w.fleet.weights(w.server.layout)
    asked = lab.experiment(lab.recordings(tmp_path / "all.npz"), method, hyper, seeds=[3], codec_up=codec,
                           codec_down=codec, skip_below=skip_below, budget={"rounds": rounds}, evaluation={"every": 2},
                           train=train or {}, robust={"rule": rule}, cohort=cohort, max_batch=max_batch)
    store = lab.run_first(asked, tmp_path / "run", first=first)
    theirs = lab.flat(fleet_server(w))
    if w.server.checkpoint.state.served is w.server.checkpoint.state.model:
        theirs = {name: value for name, value in theirs.items() if not name.startswith("served/")}
    if w.server.checkpoint.lost is not None:
        theirs |= lab.flat({"lost": w.server.checkpoint.lost})
    assert trimmed(lab.server_state(store)) == theirs
    for name in ("d0", "d1", "d2"):
        assert lab.device_state(store, name) == fleet_device(w, name)
    rows = store.rounds()
    evaluated = {row.device: row.accuracy for row in w.server.ledger.rows(Evaluation, round=rounds, stage="after")}
    assert rows[-1]["devices"] == pytest.approx(evaluated)
    told = round_figures(w.server.ledger)[-1].calibration_error
    assert rows[-1]["calibration_error"] == pytest.approx(told, abs=0.02), "up to one answer at the edge of a bin"
    arrays = {row.round: (list(row.frozen), row.reason, row.moves) for row in w.server.ledger.rows(RoundArrays)}
    assert {row["round"]: tuple(row["arrays"].values()) for row in rows if "arrays" in row} == arrays
    if codec == "auto" and method != "fedproto":
        ledger = {(one.round, one.way): (one.codec, one.reason, one.left_out)
                  for one in w.server.ledger.rows(RoundCodec)}
        assert {(row["round"], way): tuple(row["codecs"][way].values()) for row in rows for way in WAYS} == ledger
        assert {codec for codec, _, _ in ledger.values()} >= {"int8", "int4"}
    updates = w.server.ledger.rows(Update, status="counted")
    skipped = [sum(update.skipped for update in updates if update.round == row["round"]) for row in rows]
    assert [row.get("skipped", 0) for row in rows] == skipped
    assert bool(sum(skipped)) == bool(skip_below and method != "fedproto")
    assert [row["models_transmitted"] for row in rows] == [r.models_transmitted for r in w.server.ledger.rounds()]
    check_bytes(w, rows)
    answers = {name: value for name, value in lab.server_state(store).items() if name.startswith("answers/")}
    for name in ("d0", "d1", "d2"):
        held = w.agents[name].service.slots.weights()
        assert lab.flat({"answers": held.params}) == answers, "devices answer with the same bits"
    w.close()
    return store


def check_bytes(w: World, rows: list[dict[str, Any]]) -> None:
    """The simulation's bytes are the fleet's, in each round."""
    updates = [row for row in w.server.ledger.rows(Update) if row.status != "late"]
    for row in rows:
        down = w.server.ledger.rows(Traffic, round=row["round"], direction="down", kind="model")
        assert row["payload_bytes"] == {
            "up": sum(update.payload_bytes for update in updates if update.round == row["round"]),
            "down": sum(traffic.payload_bytes for traffic in down),
        }
    assert sum(row.get("serve_bytes", 0) for row in rows) == w.server.ledger.totals().payload_by_kind["serve"].down


@pytest.mark.parametrize(
    ("method", "hyper", "codec", "cohort"),
    [
        ("pfldyn-proto", EPISODES, "ternary", 2),
        ("fedavg", TUNED, "int8", 4),
        pytest.param("pfldyn-proto", EPISODES, "auto", 2, marks=pytest.mark.slow),
        pytest.param("fedavg", TUNED, "ternary", 2, marks=pytest.mark.slow),
        pytest.param("scaffold", TUNED, "int4", 2, marks=pytest.mark.slow),
        pytest.param("fedper", PLAIN, "topk-10", 2, marks=pytest.mark.slow),
        pytest.param("lg-fedavg", PLAIN, "ternary", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_run_counts_the_bytes_of_a_fleet_whose_devices_miss_rounds(
    tmp_path: Path, method: str, hyper: dict[str, Any], codec: str, cohort: int
) -> None:
    w = run_fleet(tmp_path / "fleet", method, hyper, codec, rounds=10, devices=6, hidden=80, seed=0, cohort=cohort)
    asked = missing_rounds(tmp_path, method, hyper, codec, cohort)
    first = w.fleet.weights(w.server.layout)
    store = lab.run_first(asked, tmp_path / "run", first=first)
    check_bytes(w, store.rounds())
    assert w.server.checkpoint.deltas
    assert w.server.checkpoint.deltas == lab.checkpoint(store).deltas
    w.close()


def missing_rounds(tmp_path: Path, method: str, hyper: dict[str, Any], codec: str, cohort: int) -> Experiment:
    """Six devices, some of them in a round; the model is large enough for deltas to pay."""
    return lab.experiment(
        lab.recordings(tmp_path / "all.npz", devices=6), method, hyper, seeds=[0], codec_up=codec, codec_down=codec,
        cohort=cohort, budget={"rounds": 10}, evaluation={"every": 2},
        model={"name": "mlp", "options": {"hidden": [80]}},
    )


# Ended and begun again ------------------------------------------------------------------------------------------------

RESUMED: dict[str, tuple[Any, ...]] = {
    "a device's dual and what its codec left over": ("pfldyn-proto", ONE_EPISODE, "int8"),
    "groups of a device's own": ("fedrep", {"local_steps": 2, "batch": 12}, "none"),
    "moments of the server's optimizer": ("fedmeta-metasgd", ONE_EPISODE, "fp32"),
    "a scalar and its window": ("metavers", {**ONE_EPISODE, "shots": 0}, "int8"),
    "a hypernetwork and its embeddings": ("pfedhn", {"local_steps": 2, "batch": 12}, "int8"),
    "controls on both sides": ("pflscaf-maml", ONE_EPISODE, "int8-plain"),
    "what the rounds before measured": ("pfldyn-proto", ONE_EPISODE, "auto"),
    "what was too small to send": ("fedper", {"local_steps": 2, "batch": 12}, "none", {"skip_below": 1.0}),
    "arrays by a schedule within patterns": (
        "feddyn", {"local_steps": 2, "batch": 12}, "int8", {"train": {"freeze": "auto", "only": ["*.weight"]}}),
}


def resumable(
    tmp_path: Path, method: str, hyper: dict[str, Any], codec: str, more: dict[str, Any] | None = None
) -> Experiment:
    return lab.experiment(lab.recordings(tmp_path / "all.npz"), method, hyper, codec_up=codec, codec_down=codec,
                          evaluation={"every": 3}, **(more or {}))


def killed_at(write: int, asked: Experiment, folder: Path) -> bool:
    """Run in a process that is killed before its ``write``-th change of a file or folder; False if it had fewer. A fork
    server starts it: torch refuses autograd in a fork of a process that had autograd threads, as this one has after an
    export where torch is built for CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.lab"])
    process = context.Process(target=lab.run_first_and_die, args=(write, asked, folder))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.slow
@pytest.mark.parametrize("what", RESUMED)
def test_a_run_killed_between_any_two_writes_continues_to_the_same_bits(tmp_path: Path, what: str) -> None:
    asked = resumable(tmp_path, *RESUMED[what])
    wanted = lab.comparable(lab.run_first(asked, tmp_path / "undisturbed", clock=lab.ticking(0.5)))
    first, every = (1, 1) if LONG else (1 + list(RESUMED).index(what), 5)
    for write in itertools.count(first, every):
        if not killed_at(write, asked, tmp_path / str(write)):
            break
        assert lab.comparable(lab.run_first(asked, tmp_path / str(write), clock=lab.ticking(0.8))) == wanted, write
    assert write > 20


@pytest.mark.slow
def test_a_run_killed_again_and_again_continues_to_the_same_bits(tmp_path: Path) -> None:
    asked = resumable(tmp_path, *RESUMED["a device's dual and what its codec left over"])
    wanted = lab.comparable(lab.run_first(asked, tmp_path / "undisturbed"))
    rng, lives = np.random.default_rng(0), 1
    while killed_at(int(rng.integers(5, 40)), asked, tmp_path / "run"):
        lives += 1
    assert lives > 2
    assert lab.comparable(lab.run_first(asked, tmp_path / "run")) == wanted


@pytest.mark.slow
def test_a_round_s_line_that_was_torn_is_written_again(tmp_path: Path) -> None:
    asked = resumable(tmp_path, "fedavg", PLAIN, "none")
    wanted = lab.comparable(lab.run_first(asked, tmp_path / "undisturbed"))
    assert killed_at(12, asked, tmp_path / "run")
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "loss": 0.')
    assert lab.comparable(lab.run_first(asked, tmp_path / "run")) == wanted


def test_a_run_that_is_stopped_has_kept_its_last_round_and_continues_to_the_same_bits(tmp_path: Path) -> None:
    asked = resumable(tmp_path, *RESUMED["a scalar and its window"])
    wanted = lab.comparable(lab.run_first(asked, tmp_path / "undisturbed"))
    rows: list[Any] = []
    with pytest.raises(Stopped):
        lab.run_first(asked, tmp_path / "run", told=rows.append, stopped=lambda: len(rows) == 3)
    assert [row["round"] for row in rows] == [1, 2, 3]
    lab.run_first(asked, tmp_path / "run", told=rows.append)
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert lab.comparable(Store(tmp_path / "run")) == wanted


@pytest.mark.slow
def test_a_run_that_continues_counts_the_bytes_of_devices_that_missed_rounds_before_it_was_stopped(
    tmp_path: Path
) -> None:
    asked, rows = missing_rounds(tmp_path, "fedavg", PLAIN, "int8", 4), list[Any]()
    wanted = lab.comparable(lab.run_first(asked, tmp_path / "undisturbed"))
    for until in (3, 4, 7):
        with pytest.raises(Stopped):
            lab.run_first(asked, tmp_path / "run", told=rows.append, stopped=lambda until=until: len(rows) == until)
    assert lab.comparable(lab.run_first(asked, tmp_path / "run")) == wanted


def test_a_device_s_state_is_kept_once_however_often_it_took_part(tmp_path: Path) -> None:
    asked = lab.experiment(lab.recordings(tmp_path / "all.npz"), cohort=0)
    lab.run_first(asked, tmp_path / "run", clock=lab.ticking(0.5))
    assert len(list((tmp_path / "run" / "clients").glob("*/*"))) == 3


def test_a_state_after_a_round_that_does_not_count_is_neither_taken_nor_kept(tmp_path: Path) -> None:
    clients = Clients(tmp_path)

    def rounds() -> list[str]:
        return sorted(path.stem[-1] for path in tmp_path.glob("clients/*/*"))

    for number in (1, 3, 5):
        clients.save("d0", number, {"dual": {"body": {"w": np.full(2, number, np.float32)}}})
    assert [clients.load("d0", after).get("dual", {}) for after in (0, 3, 4)] == [
        {}, *[{"body": {"w": pytest.approx(np.full(2, 3.0))}}] * 2
    ]
    clients.drop_older("d0", 4)
    assert rounds() == ["3", "5"]
    clients.forget_after(4)
    assert rounds() == ["3"]


def test_what_a_killed_run_wrote_for_a_round_that_does_not_count_is_gone_when_it_continues(tmp_path: Path) -> None:
    asked, rows = lab.experiment(lab.recordings(tmp_path / "all.npz"), cohort=0), list[Any]()
    wanted = lab.comparable(lab.run_first(asked, tmp_path / "undisturbed"))
    with pytest.raises(Stopped):
        lab.run_first(asked, tmp_path / "run", told=rows.append, stopped=lambda: len(rows) == 2)
    Clients(tmp_path / "run").save("d0", 9, {"dual": {"body": {"w": np.ones(2, np.float32)}}})
    (tmp_path / "run" / ".rounds.jsonl.abc").touch()
    assert lab.comparable(lab.run_first(asked, tmp_path / "run")) == wanted
    assert not list((tmp_path / "run").glob(".rounds*"))


def test_two_simulations_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    def begin() -> None:
        with Store(tmp_path / "run").begun({"run": 1}):
            pass

    with Store(tmp_path / "run").begun({"run": 1}), pytest.raises(StateError, match="another simulation is running"):
        begin()
    begin()


def test_a_folder_that_holds_another_run_or_something_else_is_refused(tmp_path: Path) -> None:
    with Store(tmp_path / "run").begun({"run": 1}):
        pass
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        Store(tmp_path / "run").check({"run": 2})
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        Store(tmp_path / "photos").check({"run": 1})


def test_a_device_s_state_that_is_damaged_ends_the_run_with_its_path(tmp_path: Path) -> None:
    asked = lab.experiment(lab.recordings(tmp_path / "all.npz"), cohort=0)
    store = Store(tmp_path / "run")
    rows: list[Any] = []
    with pytest.raises(Stopped):
        lab.run_first(asked, store.folder, told=rows.append, stopped=lambda: len(rows) == 2)
    path = next((store.folder / "clients").glob("*/*"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match=path.parent.name):
        lab.run_first(asked, store.folder)


def test_a_device_s_name_makes_no_path(tmp_path: Path) -> None:
    clients = Clients(tmp_path / "run")
    for name in ("../../out", "a/b", ".", "x" * 300, "A", "a"):
        clients.save(name, 1, {"dual": {"body": {name: np.ones(1, np.float32)}}})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert len(list((tmp_path / "run" / "clients").iterdir())) == 6
    assert [*clients.load("A", 1)["dual"]["body"]] == ["A"]
