"""``skip_below`` in a fleet: devices that have too little to send say so, and are counted and shown as such."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud_server.commands import costs as costs_command
from cloud_server.commands import server as commands
from cloud_server.ledger.ledger_tables import Traffic, Update
from cloud_server.reports import cost_tables, html_report, terminal_view
from cloud_server.results import outcome, result
from edge_agent.rounds.train_job import TrainJobs
from fleet_core.protocol.round_messages import Manifest
from tests.support.inprocess import World, config_text, toy, without_fsync, world
from tests.support.world_checks import check_duals, settled

ROUNDS = 6


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)


def started(folder: Path, method: str = "pfldyn-proto", *, skip_below: float = 1.0, codec: str = "int8") -> World:
    link = f'up = "{codec}"\ndown = "int8"\nskip_below = {skip_below}'
    w = world(folder, config_text(method, rounds=ROUNDS, link=link, fleet="deadline_s = 1e6"))
    w.start_server()
    for n in range(3):
        w.start_agent(f"d{n}", toy(n, shift=0.3 * n))
    return w


def updates(w: World) -> dict[tuple[int, str], Update]:
    return {(row.round, row.device): row for row in w.server.ledger.rows(Update)}


def announced(w: World) -> Manifest:
    manifests = [agent.manifest for agent in w.agents.values() if agent.manifest is not None]
    return max(manifests, key=lambda manifest: manifest.seq)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A fleet whose rounds are closed; its server is open."""
    with pytest.MonkeyPatch.context() as patch:
        without_fsync(patch)
        w = started(tmp_path_factory.mktemp("skipped"))
        assert w.pump(lambda: w.closed() == ROUNDS and settled(w))
        for agent in w.agents.values():
            agent._reporter.report()
        assert w.pump(lambda: False, steps=20) is False
        return w


def closed(w: World, number: int) -> bool:
    """Whether all devices know that the round is closed, and the next one is open."""
    return w.closed() >= number and settled(w) and (w.server.open is not None or w.server.finished)


def killed_with_a_note(w: World) -> tuple[int, float, int]:
    """(round, its measure, notes in the spool) at the aggregator's death, when one device has not delivered yet."""
    assert w.pump(partial(closed, w, 1))
    while True:
        late = w.agents.pop("d2")
        assert w.pump(lambda: w.server.open is not None and len(w.server.open.received) == 2)
        opened = w.server.open
        if opened.skipped:
            w.kill_server()
            w.agents["d2"] = late
            return opened.number, opened.least_norm, opened.skipped
        w.agents["d2"] = late
        assert w.pump(partial(closed, w, opened.number))


def skipped(w: World) -> list[int]:
    """The number of skipped updates by round."""
    return [sum(row.skipped for key, row in updates(w).items() if key[0] == n) for n in range(1, ROUNDS + 1)]


@pytest.mark.slow
def test_a_device_that_skips_is_counted_and_the_round_does_not_wait_for_it(ended: World) -> None:
    rows = updates(ended)
    assert len(rows) == 3 * ROUNDS
    assert {row.status for row in rows.values()} == {"counted"}
    assert skipped(ended)[0] == 0, "the first round has no measure"
    assert 0 < sum(skipped(ended)) < 3 * ROUNDS - 3
    assert ended.clock.seconds < 1000 + 60, "no round waited for its deadline"


def test_it_sends_eight_bytes_and_its_loss(ended: World) -> None:
    sent = [row for row in updates(ended).values() if not row.skipped]
    for row in updates(ended).values():
        assert row.loss is not None
        if row.skipped:
            assert (row.payload_bytes, row.chunks) == (8, 1)
    up = ended.server.ledger.rows(Traffic, direction="up", kind="update")
    notes = sum(skipped(ended))
    assert sum(row.payload_bytes for row in up) == 8 * notes + sum(row.payload_bytes for row in sent)
    transmitted = [row.models_transmitted for row in ended.server.ledger.rounds()]
    assert transmitted == [3.0 + 3 - few for few in skipped(ended)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int8-plain", "topk-10", "fp32"])
def test_the_servers_dual_is_what_the_devices_duals_and_residuals_make_it(tmp_path: Path, codec: str) -> None:
    w = started(tmp_path, codec=codec)
    for number in range(1, ROUNDS + 1):
        assert w.pump(partial(closed, w, number))
        check_duals(w, feedback=codec in ("int8", "topk-10"))
    assert sum(skipped(w)) > 0
    w.close()


def test_a_restart_in_the_middle_of_a_round_keeps_its_measure_and_the_notes(tmp_path: Path, ended: World) -> None:
    w = started(tmp_path)
    number, least, notes = killed_with_a_note(w)
    w.start_server()
    late = w.agents.pop("d2")
    assert w.pump(lambda: w.server.open is not None)
    opened = w.server.open
    assert (opened.number, opened.least_norm, opened.skipped, set(opened.received)) == (number, least, notes,
                                                                                        {"d0", "d1"})
    w.agents["d2"] = late
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert {key: row.skipped for key, row in updates(w).items()} == {
        key: row.skipped for key, row in updates(ended).items()}
    w.close()


def test_notes_that_are_here_count_also_where_skipping_was_turned_off_meanwhile(tmp_path: Path) -> None:
    w = started(tmp_path)
    number, _, _ = killed_with_a_note(w)
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("skip_below = 1.0", "skip_below = 0.0"))
    w.start_server()
    assert w.pump(lambda: w.closed() == ROUNDS)
    rounds = {key[0] for key, row in updates(w).items() if row.skipped}
    assert max(rounds) == number
    assert {row.status for row in updates(w).values()} == {"counted"}
    assert announced(w).up.least_norm == 0.0
    assert "update_norms" not in w.server.checkpoint.facts
    w.close()


def test_an_agent_that_does_not_know_of_it_sends_every_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = TrainJobs.header

    def older(jobs: TrainJobs, manifest: Manifest) -> dict[str, Any]:
        told = header(jobs, manifest)
        if told["device"] == "d1":
            del told["manifest"]["up"]["least_norm"]
        return told

    monkeypatch.setattr(TrainJobs, "header", older)
    w = started(tmp_path)
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert {key[1] for key, row in updates(w).items() if row.skipped} == {"d0", "d2"}
    assert {row.status for row in updates(w).values()} == {"counted"}
    w.close()


def test_nothing_is_skipped_by_default(tmp_path: Path) -> None:
    w = started(tmp_path, skip_below=0.0)
    assert w.pump(lambda: w.closed() == 2)
    assert announced(w).up.least_norm == 0.0
    assert not any(row.skipped for row in updates(w).values())
    w.close()


def test_a_method_whose_server_does_not_sum_updates_skips_none_and_init_says_so(tmp_path: Path) -> None:
    w = started(tmp_path, "fedproto")
    remark = "fedproto sends sums over samples, which count in their own round alone: skip_below does not apply"
    assert remark in w.fleet.remarks()
    assert w.pump(lambda: w.closed() == 3)
    assert announced(w).up.least_norm == 0.0
    assert not any(row.skipped for row in updates(w).values())
    w.close()


# What people see ------------------------------------------------------------------------------------------------------


def test_rounds_lists_how_many_were_skipped(ended: World, capsys: pytest.CaptureFixture[str]) -> None:
    commands.rounds(ended.fleet.folder)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["round", "opened", "status", "cohort", "skipped"]
    assert [int(line.split("closed")[1].split()[1]) for line in lines if "closed" in line] == skipped(ended)
    commands.rounds(ended.fleet.folder, as_json=True)
    assert [row["skipped"] for row in json.loads(capsys.readouterr().out)] == skipped(ended)


def test_reports_and_costs_say_how_many_and_invent_no_bytes(ended: World, capsys: pytest.CaptureFixture[str]) -> None:
    data = outcome.of_fleet(ended.fleet.folder)
    assert result.validate(data) == []
    assert [one.get("skipped", 0) for one in data["rounds"]] == skipped(ended)
    assert [one["participants"] for one in data["rounds"]] == [3] * ROUNDS
    run, total = result.parse(data), sum(skipped(ended))
    line = f"{total} of {3 * ROUNDS} updates were too small to send (skip_below)"
    assert cost_tables.skipped_text(run) == line
    assert line in html_report.render(data, title="t")
    assert line in terminal_view.closing_table(run)
    some = next(one for one in run.rounds if one.skipped)
    assert f"{some.skipped} skipped" in terminal_view.round_line(some, ROUNDS)
    heads, rows = cost_tables.device_table(run)
    assert [row[heads.index("skipped")] for row in rows][-1] == str(total)
    costs_command.costs(ended.fleet.folder, as_csv=True)
    head, *lines = capsys.readouterr().out.splitlines()
    at = head.split(",").index("skipped")
    assert sum(int(line.split(",")[at]) for line in lines) == total


def test_where_none_was_skipped_no_table_has_a_column_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w = started(tmp_path, skip_below=0.0)
    assert w.pump(lambda: w.closed() == 1)
    commands.rounds(w.fleet.folder)
    run = result.parse(outcome.of_fleet(w.fleet.folder))
    assert "skipped" not in capsys.readouterr().out
    assert "skipped" not in cost_tables.device_table(run)[0]
    assert cost_tables.skipped_text(run) == ""
    w.close()
