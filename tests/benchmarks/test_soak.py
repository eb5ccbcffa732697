"""The soak: its page is what its result gives, what counts as growth, and a short run of it."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest

from benchmarks import markdown
from benchmarks.soak import churn, jumping_clock, page
from benchmarks.soak.growth import Sample, growth
from edge_agent.commands import run
from tests.support.brokers import NEEDS_MOSQUITTO

FOLDER = page.TEMPLATE.parent


def samples(per_round: float, *, lives: int = 1, rounds: int = 200) -> list[Sample]:
    """A figure of about 100 with noise, which starts again with each life."""
    draw, each = random.Random(0), rounds // lives
    return [Sample(n, n // each, 100 + per_round * (n % each) + draw.uniform(-1, 1)) for n in range(rounds)]


def test_the_page_is_what_the_result_gives() -> None:
    text, result = page.TEMPLATE.read_text(encoding="utf-8"), json.loads((FOLDER / "result.json").read_text())
    assert markdown.filled(text, page.tables(result)) == text
    assert result["rounds"] == result["planned"]


@pytest.mark.parametrize("lives", [1, 4])
def test_what_grows_is_named(lives: int) -> None:
    found = growth(samples(0.1, lives=lives), 50)
    assert found.per_100 == pytest.approx(10, rel=0.2)
    assert found.grows


@pytest.mark.parametrize("per_round", [0.0, 0.005, -0.1])
def test_noise_little_and_a_fall_are_no_growth(per_round: float) -> None:
    assert not growth(samples(per_round), 50).grows


def test_lives_that_are_too_short_have_no_slope() -> None:
    found = growth(samples(0.1, lives=40), 50)
    assert (found.per_100, found.grows, found.samples) == (None, False, 0)


def test_the_agent_whose_clock_jumps_is_given_the_time_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, read = tmp_path / "ahead", list[float]()

    def agent(arguments: list[str]) -> None:
        for seconds in ("0", "86400", "-3600"):
            ahead.write_text(seconds)
            read.append(time.time() - time.monotonic())

    monkeypatch.setattr(run, "main", agent)
    monkeypatch.setattr(sys, "argv", ["jumping_clock", str(ahead), "d0", "mqtt://127.0.0.1:1"])
    jumping_clock.main()
    assert [round(one - read[0]) for one in read] == [0, 86400, -3600]


@NEEDS_MOSQUITTO
@pytest.mark.slow
def test_a_short_run_measures_every_figure_and_nothing_ends_by_itself(tmp_path: Path) -> None:
    said: list[str] = []
    result = churn.soak(tmp_path, rounds=12, minutes=1, warm_up=4, say=said.append, write=lambda _: None)
    assert result["rounds"] > 2
    names = {name for names in (names for _, names in page.PANELS) for name in names}
    assert names <= result["series"].keys()
    assert all(points[-1][2] > 0 for name, points in result["series"].items() if name in names)
    page.tables(result)


def test_the_page_has_the_figures_of_a_long_life_and_of_cleared_messages() -> None:
    text = " ".join(page.TEMPLATE.read_text(encoding="utf-8").split())
    life = json.loads((FOLDER / "one_life.json").read_text())
    for number, quarter in enumerate(("first", "second", "third", "fourth")):
        slopes = [f"{life[name][number]['a_round']:,.0f}" for name in ("aggregator", "broker")]
        assert f"| {quarter} | {' | '.join(slopes)} |" in text
    first, last = (life["aggregator"][k]["mean"] / 1e6 for k in (0, -1))
    assert f"held {first:.1f} MB in the first quarter and {last:.1f} MB in the last" in text
    cleared = json.loads((FOLDER / "retained.json").read_text())["bytes_a_message"]
    alone, further = (cleared[case] for case in ("retained and cleared, a topic each",
                                                 "further chunks of the same blobs"))
    assert f"{alone:,.0f} bytes for a model and {further:.0f} bytes for each chunk after its first" in text
    assert cleared["not retained"] == cleared["retained and cleared, one topic"] == 0
