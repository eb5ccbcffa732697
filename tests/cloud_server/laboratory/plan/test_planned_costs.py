"""A plan of a run's costs, against what fleets and simulations really cost; absent figures have a reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloud_server.commands import cli
from cloud_server.commands import plan as plan_command
from cloud_server.figures.formatting import bytes_text
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import planned_bytes, planned_costs
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.ledger.ledger_sums import Bytes
from cloud_server.ledger.ledger_tables import Evaluation
from fleet_core.base import config
from fleet_core.base.errors import ConfigError
from fleet_core.board import profile
from fleet_core.board.profile import Profile
from fleet_core.data.samples import save
from tests.support import lab
from tests.support.inprocess import config_text, toy, world

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

WITHIN = 0.2

Plan = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    def run(*arguments: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["metafleet", "plan", *map(str, arguments), "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert not ended.value.code, shown.err
        return list(json.loads(shown.out))

    return run


@pytest.fixture
def board(tmp_path: Path) -> Profile:
    path = tmp_path / "board.toml"
    path.write_text(config.toml({
        "name": "bench", "title": "a bench", "arch": "aarch64",
        "power": {"idle_w": 2.0, "busy_w": 6.0, "source": "a test"},
        "compute": {"effective_flop_per_s": 1e9, "source": "a test"},
        "radio": {"j_per_byte": 1e-6, "source": "a test"},
    }))
    return profile.load(path)


@pytest.mark.parametrize(("method", "codec", "cohort", "rounds", "hidden", "train"), [
    ("fedavg", "fp32", 0, 3, 60, ""), ("pfldyn-proto", "int8", 2, 6, 60, ""), ("fedper", "int8", 0, 5, 60, ""),
    ("fedavg", "int8", 2, 6, 40, 'only = ["head.*"]'),
])
@pytest.mark.slow
def test_the_planned_payload_is_within_a_fifth_of_the_ledgers(
    tmp_path: Path, plan: Plan, method: str, codec: str, cohort: int, rounds: int, hidden: int, train: str
) -> None:
    text = config_text(method, rounds=rounds, fleet=f"cohort = {cohort}", link=f'up = "{codec}"\ndown = "{codec}"')
    text = text.replace("hidden = [6]", f"hidden = [{hidden}]").replace(f"serve_every = {rounds}", "serve_every = 2")
    text += f"[train]\n{train}\n"
    w = world(tmp_path, text)
    (before,) = plan(w.fleet.folder, "--devices", 3)
    w.start_server()
    for n in range(3):
        w.start_agent(f"d{n}", toy(n, shift=float(n)))
    assert w.pump(lambda: len({row.device for row in w.server.ledger.rows(Evaluation, round=rounds)}) == 3)
    (after,) = plan(w.fleet.folder / "fleet.toml")
    save(tmp_path / "some.npz", toy(0))
    (on_samples,) = plan(w.fleet.folder, "--data", tmp_path / "some.npz")
    payload, kinds = w.server.ledger.volume()[None].payload, w.server.ledger.totals().payload_by_kind
    assert before["payload_bytes"] == after["payload_bytes"], "the enrolled devices are as many"
    for way in ("up", "down"):
        assert before["payload_bytes"][way] == pytest.approx(getattr(payload, way), rel=WITHIN)
        assert on_samples["payload_bytes"][way] == pytest.approx(getattr(payload, way), rel=WITHIN)
        for kind, moved in kinds.items():
            assert before["kinds"][kind][way] == pytest.approx(getattr(moved, way), rel=WITHIN), kind
    assert before["flops"] >= sum(w.server.ledger.flops().values()), "the devices have few samples for a batch"
    assert on_samples["sizes"].endswith("devices on its own samples") or train
    assert before["chunk_bytes"]["down"] > 0
    assert before["wire_bytes"]["down"] > before["payload_bytes"]["down"] + before["chunk_bytes"]["down"]
    w.close()


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "devices", "more"), [
    ("none", 3, {}), ("int8", 3, {}),
    ("none", 3, {"train": {"only": ["layers.*"]}}), ("int8", 3, {"train": {"only": ["*.bias"]}}),
    ("ternary", 12, {"budget": {"rounds": 20}, "model": {"name": "mlp", "options": {"hidden": [80]}}}),
])
def test_the_plan_of_an_experiment_is_what_its_simulation_sends(
    tmp_path: Path, plan: Plan, codec: str, devices: int, more: dict[str, Any]
) -> None:
    recordings = lab.recordings(tmp_path / "all.npz", devices)
    asked = lab.settings(recordings, cohort=2, codec_up=codec, codec_down=codec, **more)
    path = tmp_path / "experiment.toml"
    tables = {key: value for key, value in asked.items() if key != "method"}
    path.write_text(config.toml({key: value for key, value in tables.items() if not isinstance(value, dict)})
                    + '[[method]]\nname = "fedavg"\nlabel = "plain"\nhyper.local_steps = 3\n'
                    + config.toml({key: value for key, value in tables.items() if isinstance(value, dict)}))
    (found,) = plan(path)
    rows = lab.run_first(experiments.load(path), tmp_path / "run").rounds()
    assert (found["label"], found["rounds"], found["cohort"]) == ("plain", len(rows), 2)
    for way in ("up", "down"):
        assert found["payload_bytes"][way] == pytest.approx(sum(row["payload_bytes"][way] for row in rows), rel=WITHIN)
    assert found["flops"] == pytest.approx(sum(row["flops"] for row in rows), rel=WITHIN)
    assert "chunk_bytes" not in found
    assert "wire_bytes" not in found
    assert "joules" not in found
    assert found["absent"] == dict.fromkeys(("joules", "seconds"), "no board is named: --board NAME")


def asked(tmp_path: Path, **more: Any) -> planned_bytes.Asked:
    experiment = lab.experiment(lab.recordings(tmp_path / "all.npz"), "fedavg", {"local_steps": 2})
    layout = workloads.layout_of(experiment, workloads.build(experiment))
    run = experiments.runs(experiment)[0]
    given = {"label": "x", "method": run.method, "hyper": run.hyper, "layout": layout, "rounds": 4, "devices": 3}
    return planned_bytes.Asked(**{**given, **more})


def test_auto_is_planned_as_the_dearest_codec_with_the_cheapest_as_lower_limit(tmp_path: Path) -> None:
    codecs = ("auto", "auto"), ("int8", "int8"), ("topk-10", "ternary")
    auto, dear, cheap = (
        planned_costs.planned(asked(tmp_path, codec_up=up, codec_down=down), None) for up, down in codecs
    )
    assert auto.payload_bytes == dear.payload_bytes
    assert dear.auto is None
    assert auto.auto == (
        "auto is planned as int8 up and int8 down, an upper limit; with topk-10 and ternary in every round the payload "
        f"is {bytes_text(cheap.payload_bytes.up)} up and {bytes_text(cheap.payload_bytes.down)} down"
    )


def test_a_schedule_is_planned_as_if_no_array_came_to_rest(tmp_path: Path) -> None:
    without, with_one = (planned_costs.planned(asked(tmp_path, schedule=one), None) for one in (False, True))
    assert without.payload_bytes == with_one.payload_bytes
    assert (without.auto, with_one.auto) == (
        None, "freeze = auto is planned as if no array came to rest, an upper limit")


def test_joules_and_seconds_come_from_the_boards_cited_constants(tmp_path: Path, board: Profile) -> None:
    found = planned_costs.planned(asked(tmp_path), board)
    assert found.flops is not None
    moved = found.payload_bytes.up + found.payload_bytes.down
    assert found.joules == pytest.approx(found.flops * (6.0 - 2.0) / 1e9 + moved * 1e-6)
    assert found.seconds == pytest.approx(found.flops / 3 / 1e9), "three devices compute side by side"
    assert found.absent == {}


def test_a_board_without_constants_gives_no_joules_and_says_why(tmp_path: Path) -> None:
    found = planned_costs.planned(asked(tmp_path), Profile("bare", "bare", "aarch64"))
    assert (found.joules, found.seconds) == (None, None)
    assert "compute: no cited idle and busy watts" in found.absent["joules"]
    assert found.absent["seconds"] == "no cited effective FLOP/s"


def test_a_cohort_is_paid_for_and_not_the_whole_fleet(tmp_path: Path) -> None:
    whole, part = (planned_costs.planned(asked(tmp_path, devices=100, cohort=cohort), None) for cohort in (0, 10))
    assert part.payload_bytes.up == whole.payload_bytes.up / 10
    assert part.cohort == 10


@pytest.mark.slow
def test_a_fleet_without_devices_has_to_be_told_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    w = world(tmp_path, config_text())
    monkeypatch.setattr(sys, "argv", ["metafleet", "plan", str(w.fleet.folder)])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--devices N" in capsys.readouterr().err


def test_the_wire_has_the_headers_of_segments_and_every_devices_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_bytes.Sizes, "chunk_overhead", lambda self: Bytes(up=0, down=0))
    sizes = planned_bytes.Sizes(asked(tmp_path, rounds=4, devices=10, cohort=2))
    messages, manifest = planned_bytes.MESSAGES, planned_bytes.MANIFEST
    found = sizes.on_wire(Bytes(up=2 * 1448, down=0))
    assert found.up == 2 * 1448 + 2 * 52 + 4 * (2 * messages.up + 8 * manifest.up)
    assert found.down == 52 + 4 * (2 * messages.down + 8 * manifest.down)


def test_an_experiment_names_its_samples_itself(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('[data]\nset = "heartbeat"\n')
    with pytest.raises(ConfigError, match="--data is for a fleet"):
        plan_command.plan(path, data="some.npz")
