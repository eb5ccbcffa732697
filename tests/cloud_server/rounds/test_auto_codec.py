"""``codec = "auto"`` in a fleet: signed, in the ledger with its reason, the same after a restart, shown to people."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud_server.broadcast.round_codecs import RoundCodecs
from cloud_server.commands import server as commands
from cloud_server.ledger.ledger_tables import Round, RoundCodec
from cloud_server.membership.inability import inability
from cloud_server.records.fleet_settings import LinkSection
from cloud_server.reports import html_report, terminal_view
from cloud_server.results import outcome, result
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.model import choose_codec
from fleet_core.protocol import messages
from fleet_core.protocol.device_messages import Presence
from fleet_core.protocol.round_messages import Manifest, UploadManifest
from tests.support.inprocess import World, config_text, toy, without_fsync, world

AUTO = 'up = "auto"\ndown = "auto"'
ROUNDS = 8


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)


def started(folder: Path, link: str = AUTO, rounds: int = ROUNDS, method: str = "pfldyn-proto") -> World:
    w = world(folder, config_text(method, rounds=rounds, link=link))
    w.start_server()
    for n in range(3):
        w.start_agent(f"d{n}", toy(n, shift=0.3 * n))
    return w


def choices(w: World) -> dict[tuple[int, str], tuple[str, str, float | None]]:
    return {(r.round, r.way): (r.codec, r.reason, r.left_out) for r in w.server.ledger.rows(RoundCodec)}


def manifests(w: World) -> list[Manifest]:
    return [agent.manifest for agent in w.agents.values() if agent.manifest is not None and agent.manifest.open]


def is_open(w: World, number: int) -> bool:
    """Whether the round is open and a device has heard of it."""
    opened = w.server.open
    return opened is not None and opened.number == number and any(m.round == number for m in manifests(w))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A fleet whose rounds are closed; its server is open."""
    with pytest.MonkeyPatch.context() as patch:
        without_fsync(patch)
        w = started(tmp_path_factory.mktemp("auto"))
        assert w.pump(lambda: w.closed() == ROUNDS)
        return w


@pytest.mark.slow
def test_the_codecs_of_a_round_are_in_its_signed_manifest_and_in_the_ledger(tmp_path: Path) -> None:
    w = started(tmp_path)
    announced = {}
    for number in range(1, ROUNDS + 1):
        assert w.pump(partial(is_open, w, number))
        manifest = next(manifest for manifest in manifests(w) if manifest.round == number)
        announced[number] = manifest.up.codecs, manifest.model.codec
    assert w.pump(lambda: w.closed() == ROUNDS)
    found = choices(w)
    assert announced[1] == (("int8",), "drawn"), "the first model is no change to another"
    assert announced[4] == (("int4", "int8"), "int4")
    assert announced[7][0] == ("topk-10", "int4", "int8")
    for number in range(2, ROUNDS + 1):
        up, down = announced[number]
        assert (up[0], down) == (found[number, "up"][0], found[number, "down"][0])
    assert all(reason for _, reason, _ in found.values())
    assert found[1, "down"][2] is None, "of a whole model nothing is left out"
    assert all(left is not None and left > 0 for (number, _), (_, _, left) in found.items() if number > 1)
    w.close()


@pytest.mark.slow
def test_a_restart_in_the_middle_of_a_round_chooses_the_same_codecs(tmp_path: Path, ended: World) -> None:
    w = started(tmp_path)
    for number in range(1, ROUNDS + 1):
        assert w.pump(partial(is_open, w, number))
        before = w.server.open.codecs
        w.kill_server()
        w.start_server()
        assert w.pump(lambda: w.server.open is not None)
        assert w.server.open.codecs == before
    assert w.pump(lambda: w.closed() == ROUNDS)
    assert choices(w) == choices(ended)
    w.close()


def test_what_agents_do_not_say_they_left_out_keeps_the_codec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As agents of a version without ``residual``."""
    encode = messages.encode

    def without_residual(message: Any, **how: Any) -> bytes:
        if not isinstance(message, UploadManifest):
            return encode(message, **how)
        data = encode(message)
        return json.dumps({key: value for key, value in json.loads(data).items() if key != "residual"}).encode()

    monkeypatch.setattr(messages, "encode", without_residual)
    w = started(tmp_path, rounds=5)
    assert w.pump(lambda: w.closed() == 5)
    found = choices(w)
    assert {found[n, "up"][:1] for n in range(1, 6)} == {("int8",)}
    assert "is not known" in found[5, "up"][1]
    assert found[5, "down"][0] == "int4"
    w.close()


def test_a_device_needs_the_models_codecs_and_the_dearest_of_updates() -> None:
    def cannot(codecs: tuple[str, ...], method: str) -> str | None:
        known = Presence(st="on", boot="b", methods={method: METHODS[method].version}, codecs=codecs)
        return inability(known, method=METHODS[method], link=link, parameters=1)

    link = LinkSection(up="auto", down="auto")
    models = choose_codec.ladder("down", ())
    assert cannot(models, "scaffold") is None
    assert cannot(("fp32", "int8"), "scaffold") == f"lacks codec {' or '.join(models)}"
    link = LinkSection(up="topk-1", down="int8")
    assert cannot(("fp32", "int8"), "scaffold") == "lacks codec topk-1 or int8"


def test_a_device_that_lacks_the_rounds_codec_may_send_a_dearer_one(ended: World) -> None:
    codecs = RoundCodecs(ended.fleet, ended.server.ledger)
    assert codecs.accepted("int4") == ("int4", "int8")
    assert codecs.accepted() == choose_codec.ladder("up", ["dual"])


def test_a_codec_that_is_set_has_no_reason_and_no_alternatives(tmp_path: Path) -> None:
    w = started(tmp_path, 'up = "topk-10"\ndown = "int4"', rounds=2)
    assert w.pump(lambda: w.closed() == 2)
    assert {key: value[:2] for key, value in choices(w).items()} == {
        (n, way): (codec, "") for n in (1, 2) for way, codec in (("up", "topk-10"), ("down", "int4"))
    }
    assert w.agents["d0"].manifest.up.codecs == ("topk-10",)
    w.close()


# What people see ------------------------------------------------------------------------------------------------------


def test_rounds_explain_says_why(ended: World, capsys: pytest.CaptureFixture[str]) -> None:
    commands.rounds(ended.fleet.folder)
    plain = capsys.readouterr().out
    assert "why" not in plain
    commands.rounds(ended.fleet.folder, explain=True)
    lines = capsys.readouterr().out
    assert lines.startswith(plain)
    first = next(line for line in lines.splitlines() if line.split()[:3] == ["1", "up", "int8"])
    assert "starts with int8, the dearest of int8, int4, topk-10" in first
    later = next(line for line in lines.splitlines() if line.split()[:3] == ["4", "up", "int4"])
    assert "of the model's move, at most 1.5: down a step from int8" in later


def test_rounds_explain_as_json(ended: World, capsys: pytest.CaptureFixture[str]) -> None:
    commands.rounds(ended.fleet.folder, as_json=True)
    assert all("codecs" not in row for row in json.loads(capsys.readouterr().out))
    commands.rounds(ended.fleet.folder, explain=True, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    found = choices(ended)
    assert [row["round"] for row in rows] == [r.round for r in ended.server.ledger.rows(Round)]
    for row in rows:
        for way in choose_codec.WAYS:
            assert tuple(row["codecs"][way][key] for key in ("codec", "reason", "left_out")) == found[row["round"], way]


def test_the_reports_have_the_codecs_of_the_rounds(ended: World) -> None:
    data = outcome.of_fleet(ended.fleet.folder)
    assert result.validate(data) == []
    assert data["rounds"][3]["codecs"]["up"]["codec"] == "int4"
    page = html_report.render(data, title="t")
    assert "<h2>Codecs</h2>" in page
    assert '<th scope="row">1 to 3</th><td>int8</td><td>int8</td>' in page
    table = terminal_view.closing_table(result.parse(data))
    line = next(line for line in table.splitlines() if line.startswith("codecs"))
    assert line.split(maxsplit=2)[1:] == ["up", "int8 3, int4 3, topk-10 2"]


def test_the_report_of_set_codecs_has_no_section_of_them(tmp_path: Path) -> None:
    w = started(tmp_path, 'up = "int8"\ndown = "int8"', rounds=1)
    assert w.pump(lambda: w.closed() == 1)
    data = outcome.of_fleet(w.fleet.folder)
    assert data["rounds"][0]["codecs"]["up"]["codec"] == "int8"
    assert "<h2>Codecs</h2>" not in html_report.render(data, title="t")
    assert "codecs" not in terminal_view.closing_table(result.parse(data))
    w.close()
