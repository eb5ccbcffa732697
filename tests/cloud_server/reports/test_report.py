"""Report, live view and closing table of complete, partial and hostile runs."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks.console.browser import chromium
from cloud_server.figures import formatting
from cloud_server.figures.charts import Line, legend, line_chart, ticks
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes, Joules
from cloud_server.ledger.ledger_tables import Device, Energy, Evaluation, Round, Traffic, Update
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import LiveView, Snapshot, closing_table, round_line, snapshot
from cloud_server.results import outcome, result
from fleet_core.base.errors import DataError
from fleet_core.tasks.calibration import BINS

NAMES, NEW = ("106", "119", "124"), "118"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """The page's words and tags; fails on a tag that is not closed."""

    def __init__(self, text: str):
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.path: list[str] = []
        self.feed(text)
        assert self.path == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.path.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.path.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.path and data.strip():
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as books:
        yield books


def fill(ledger: Ledger, rounds: int = 7, *, energy: bool = True, evaluated: bool = True, wire: bool = True) -> None:
    ledger.put(*[Device(name=name, state="on", phase="train", took_part=True) for name in NAMES])
    ledger.put(Device(name=NEW, state="on", phase="serve", new=True))
    for number in range(1, rounds + 1):
        with ledger.transaction():
            ledger.put(Round(round=number, opened_at=1.0, cohort=NAMES, loss=1 / number, seconds=2.1, status="closed"))
            for i, name in enumerate(NAMES):
                ledger.put(Update(round=number, device=name, update_id=name, received_at=1.0))
                for direction, kind, size in (("up", "update", 140_000), ("down", "model", 150_000)):
                    ledger.put(Traffic(round=number, device=name, direction=direction, kind=kind, payload_bytes=size,
                                       mqtt_bytes=size + 900, wire_bytes=size + 9000 if wire else None))  # fmt: skip
                if energy:
                    ledger.put(
                        Energy(round=number, device=name, phase="train", joules=4.0, source="RAPL", measured=True)
                    )
                row = result.evaluation(number, name, "after", "pfldyn-proto", [[70 + number, 10 - i], [5, 5]])
                if evaluated and row:
                    ledger.put(row)
    row = result.evaluation(rounds, NEW, "after", "pfldyn-proto", [[9, 1], [0, 10]], new=True)
    if evaluated and row:
        ledger.put(row)


def built(ledger: Ledger, *, baseline: bool = True) -> result.Result:
    stages = {"before": [[9, 1], [10, 0]], "fine_tuned": [[9, 1], [5, 5]]}
    return result.build(ledger, method="pfldyn-proto", seed=0, config={"note": "<b>&"},
                        baseline=dict.fromkeys((*NAMES, NEW), stages) if baseline else None)  # fmt: skip


def page(ledger: Ledger, *, title: str = "Hearts", baseline: bool = True) -> tuple[str, Page]:
    html = render(result.to_json(built(ledger, baseline=baseline)), title=title)
    return html, Page(html)


def test_the_report_tells_before_and_after_bytes_and_joules(ledger: Ledger) -> None:
    fill(ledger)
    data = built(ledger)
    assert data.evaluated is not None
    assert data.evaluated.before is not None
    _, seen = page(ledger)
    assert f"{data.evaluated.before.macro_f1:.3f} → {data.evaluated.macro_f1:.3f}" in seen.text
    for words in ("FedAvg, not personalized", "FedAvg fine-tuned", "PFLDyn-Proto personalized", "measured: RAPL",
                  "84.0 J", "2.94 MB", "118 new", "3 devices and 1 new · 7 rounds · seed 0"):  # fmt: skip
        assert words in seen.text


def test_the_report_needs_nothing_from_outside_itself(ledger: Ledger) -> None:
    fill(ledger)
    html, seen = page(ledger)
    assert not re.search(r"https?:|url\(|@import|<script|\bsrc=|\bhref=", html)
    assert ("meta", "default-src 'none'; style-src 'unsafe-inline'") in [(t, a.get("content")) for t, a in seen.tags]


def test_every_chart_is_well_formed_named_and_has_a_table(ledger: Ledger) -> None:
    fill(ledger)
    html, seen = page(ledger)
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r'<svg viewBox="0 0 480.*?</svg>', html)]
    assert [chart.findtext("title") for chart in charts] == [
        "Accuracy of the devices over the rounds", "Training loss over the rounds",
        "Bytes up, all devices, running sum over the rounds", "Bytes down, all devices, running sum over the rounds",
        "Accuracy against payload bytes",
    ]  # fmt: skip
    assert all(chart.findtext("desc") for chart in charts)
    ids = [a["id"] for _, a in seen.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert seen.text.count("The figures as a table") == len(charts)


def test_a_report_against_another_run_tells_what_changed(ledger: Ledger) -> None:
    fill(ledger)
    here = result.to_json(built(ledger))
    there = json.loads(json.dumps(here))
    there |= {"seed": 1, "config": {"note": "other", "only": 1}, "rounds": there["rounds"][:5]}
    there["totals"]["payload_bytes"]["up"] *= 2
    there["evaluated"]["accuracy"] -= 0.125
    del there["totals"]["wire_bytes"]
    seen = Page(render(here, title="Hearts", against=("b <i>", there)))
    assert "Against b <i>" in seen.text
    both = outcome.differences(result.parse(here), result.parse(there))
    rows = {one.what: one.cells()[1:] for one in both}
    assert rows["payload bytes up"] == ("2.94 MB", "5.88 MB", "-50.0 %")
    assert rows["accuracy, all devices"][2] == "+0.125"
    assert rows["rounds"] == ("7", "5", "+40.0 %")
    assert rows["wire bytes up"][1:] == (formatting.ABSENT, formatting.ABSENT)
    assert rows[f"accuracy of {NEW}"][2] == "+0.000"
    assert "operations" not in rows
    changed = outcome.changed_settings(result.parse(here), result.parse(there))
    assert changed == [("note", "<b>&", "other"), ("only", formatting.ABSENT, "1"), ("seed", "0", "1")]
    plain = outcome.plain_differences(result.parse(here), result.parse(there))
    figures = {one["what"]: one for one in plain["figures"]}
    assert figures["rounds"] == {"what": "rounds", "this": 7, "other": 5}
    assert "other" not in figures["wire bytes up"]
    assert {"setting": "only", "other": 1} in plain["settings"]
    same = Page(render(here, title="Hearts", against=("c", here)))
    assert "The settings are the same." in same.text


@pytest.mark.slow
@pytest.mark.needs("chromium", "chromedriver")
def test_on_paper_the_settings_are_shown_and_closed_tables_are_not(ledger: Ledger, tmp_path: Path) -> None:
    fill(ledger)
    path = tmp_path / "report.html"
    path.write_text(page(ledger)[0], encoding="utf-8")
    shown = "return [...document.querySelectorAll('{}')].map(one => one.checkVisibility())"
    with chromium() as driver:
        driver.get(path.as_uri())
        assert driver.execute_script(shown.format(".settings .table")) == [False]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [
            {"name": "prefers-color-scheme", "value": "dark"}]})
        assert driver.execute_script(shown.format(".settings .table")) == [True]
        assert set(driver.execute_script(shown.format("figure details"))) == {False}
        colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert colour == "rgb(255, 255, 255)"


def test_what_is_written_by_others_is_escaped(ledger: Ledger) -> None:
    name = "<script>alert(1)</script>"
    row = result.evaluation(7, name, "after", "<i>own</i>", [[1, 0], [0, 0]])
    assert row is not None
    fill(ledger)
    ledger.put(Device(name=name), row)
    run = result.build(ledger, method="<i>own</i>", seed=0, config={"<u>": "<s>"})
    html = render(result.to_json(run), title="</title><b>")
    assert not re.search(r"<script|<i>|<u>|<s>|<b>", html)
    assert "&lt;script&gt;alert(1)" in html


def test_a_run_without_baseline_energy_or_wire_says_so(ledger: Ledger) -> None:
    fill(ledger, energy=False, wire=False)
    _, seen = page(ledger, baseline=False)
    assert "not measured" in seen.text
    assert "wire not counted not counted" in seen.text
    assert "FedAvg" not in seen.text
    assert "→" not in seen.text


def test_a_run_that_was_interrupted_before_any_evaluation_has_a_report(ledger: Ledger) -> None:
    fill(ledger, rounds=1, evaluated=False)
    ledger.put(Round(round=2, opened_at=2.0, cohort=NAMES))
    _, seen = page(ledger, baseline=False)
    assert "not evaluated yet" in seen.text
    assert "No round of this run was evaluated." in seen.text
    assert "1 round ·" in seen.text


def test_a_run_that_closed_no_round_has_a_report(ledger: Ledger) -> None:
    _, seen = page(ledger, baseline=False)
    assert "No device was evaluated in this run." in seen.text
    assert all(tag != "svg" for tag, _ in seen.tags)
    assert not {"nan", "None", "inf"} & set(seen.text.split())


def test_a_sum_that_lacks_reports_says_how_many(ledger: Ledger) -> None:
    fill(ledger)
    ledger.put(Traffic(round=7, device="106", direction="up", kind="update", payload_bytes=1),
               Traffic(round=7, device="106", direction="down", kind="model", payload_bytes=1))  # fmt: skip
    _, seen = page(ledger)
    assert "1 report missing" in seen.text
    assert "(1 report missing)" in closing_table(built(ledger))


def test_what_is_no_result_gets_no_report() -> None:
    with pytest.raises(DataError):
        render({"format": 1}, title="x")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.7, 1, [0.7, 0.8, 0.9, 1]), (0, 13.2, [0, 5, 10, 15]),
     (0, 3e-7, [0, 1e-7, 2e-7, 3e-7])],
)  # fmt: skip
def test_ticks_are_round_and_cover_the_figures(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_chart_of_one_point_is_drawn() -> None:
    line = Line("<x>", "one", [(1, 0.5)])
    svg = line_chart("c", "t<", "d&", [line], y_ticks=[0, 1], y_text=str, x_label="round")
    assert ElementTree.fromstring(svg).find("circle") is not None
    assert "&lt;x&gt;" in legend([line])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1.00 kB"), (1000, "1.00 kB"), (52_340, "52.3 kB"), (999_600, "1.00 MB"),
     (424_000, "424 kB"), (3.2e15, "3200 TB"), (12.34, "12.3 B")],
)  # fmt: skip
def test_bytes_have_three_digits_and_a_unit(count: float, text: str) -> None:
    assert formatting.bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.1, "2.1 s"), (59.97, "1 min 00 s"), (65, "1 min 05 s"), (7380, "2 h 03 min")]
)
def test_seconds_are_told_as_people_tell_them(seconds: float, text: str) -> None:
    assert formatting.seconds_text(seconds) == text


def test_methods_are_spelled_as_in_their_papers_and_own_ones_kept() -> None:
    names = ["fedavg", "p-avg-proto", "pfldyn-proto", "pfldyn-maml", "per-fedavg-fo", "my-own"]
    spelled = ["FedAvg", "P-Avg-Proto", "PFLDyn-Proto", "PFLDyn-MAML", "Per-FedAvg-FO", "my-own"]
    assert [formatting.method_text(name) for name in names] == spelled


def test_a_round_is_one_plain_line() -> None:
    closed = result.RoundFigures(
        round=7, asked=9, participants=8, refused=0, loss=0.4123,
        accuracy=result.Spread(mean=0.913, worst=0.801, best=0.99),
        payload_bytes=Bytes(up=420_000, down=430_000), seconds=2.1,
    )  # fmt: skip
    assert round_line(closed, 30) == (
        "round  7/30  8 of 9 devices  loss 0.412  accuracy 0.913 (worst 0.801, best 0.990)"
        "  up 420 kB  down 430 kB  energy not measured  2.1 s"
    )


def test_a_round_without_figures_is_still_a_line_and_refusals_are_reported() -> None:
    closed = result.RoundFigures(round=7, participants=0, refused=2)
    assert round_line(closed, 9) == "round 7/9  0 devices  2 refused  bytes not counted  energy not measured"


def test_when_piped_each_round_is_reported_once(ledger: Ledger) -> None:
    stream = io.StringIO()
    fill(ledger, rounds=2)
    with LiveView(30, stream, settle_s=0) as view:
        view.update(snapshot(ledger))
        view.update(snapshot(ledger))
        ledger.put(Round(round=3, opened_at=1.0, status="closed"))
        view.update(snapshot(ledger))
        view.say("closing\x1b[31m")
    lines = stream.getvalue().splitlines()
    assert [line[:11] for line in lines] == ["round  1/30", "round  2/30", "round  3/30", "closing?[31"]
    assert "energy 12.0 J" in lines[0]


def test_a_resumed_run_does_not_tell_its_history_again(ledger: Ledger) -> None:
    stream = io.StringIO()
    fill(ledger, rounds=3)
    LiveView(30, stream, after_round=2, settle_s=0).update(snapshot(ledger))
    assert stream.getvalue().startswith("round  3/30")


def test_a_plain_line_waits_for_what_devices_report_after_the_close(ledger: Ledger) -> None:
    stream = io.StringIO()
    ledger.put(Round(round=1, opened_at=1.0, status="closed"))
    with LiveView(30, stream, settle_s=1000) as view:
        view.update(snapshot(ledger))
        assert not stream.getvalue()
        ledger.put(Round(round=1, opened_at=1.0, status="closed", loss=0.5))
        ledger.put(Round(round=2, opened_at=2.0, status="closed"))
        view.update(snapshot(ledger))
        assert "loss 0.500" in stream.getvalue()
        assert "round  2/30" not in stream.getvalue()
    assert "round  2/30" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("LINES", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_on_a_terminal_a_table_follows_the_rounds(ledger: Ledger, terminal: Terminal) -> None:
    fill(ledger, rounds=2)
    ledger.put(Round(round=3, opened_at=1.0, cohort=NAMES), Device(name="late", state="on", cannot="no torch [red]"))
    ledger.put(Update(round=3, device="106", update_id="u", received_at=1.0))
    with LiveView(30, terminal) as view:
        view.update(snapshot(ledger))
        view.say("a device joined")
    seen = terminal.getvalue()
    assert "\x1b[" in seen
    for words in ("round 2/30", "about 58.8 s left", "round 3 in flight: 1/3 updates", "118 (new)", "280 kB", "8.00 J",
                  "not measured", "cannot: no torch [red]", "a device joined"):  # fmt: skip
        assert words in seen


def test_no_color_on_a_terminal_asks_for_plain_lines(
    ledger: Ledger, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    fill(ledger, rounds=2)
    with LiveView(30, terminal) as view:
        view.update(snapshot(ledger))
    assert "\x1b" not in terminal.getvalue()
    assert len(terminal.getvalue().splitlines()) == 2


def test_eighty_columns_hold_the_whole_table(ledger: Ledger) -> None:
    fill(ledger, rounds=2)
    stream = io.StringIO()
    Console(file=stream, width=80).print(LiveView(30, io.StringIO()).table(snapshot(ledger)))
    seen = stream.getvalue()
    assert max(map(len, seen.splitlines())) <= 80
    assert [name for name in (*NAMES, "round 2/30", "118 (new)") if name not in seen] == []
    assert "…" not in seen


def test_the_table_of_a_fleet_that_has_not_begun_and_of_a_large_one(ledger: Ledger) -> None:
    def shown() -> str:
        stream = io.StringIO()
        Console(file=stream, width=100).print(LiveView(30, io.StringIO()).table(snapshot(ledger)))
        return stream.getvalue()

    assert "no round closed yet" in shown()
    ledger.put(*[Device(name=f"d{i:02}") for i in range(25)], Device(name="gone", status="revoked"))
    assert "and 5 more" in shown()


def test_an_empty_snapshot_tells_nothing() -> None:
    stream = io.StringIO()
    LiveView(3, stream).update(Snapshot())
    assert stream.getvalue() == ""


def test_the_closing_table_tells_devices_costs_and_files(ledger: Ledger) -> None:
    fill(ledger)
    text = closing_table(built(ledger), report="out/report.html", result_file="out/result.json")
    lines = text.splitlines()
    assert re.fullmatch(r" +FedAvg, not personalized +FedAvg fine-tuned +PFLDyn-Proto personalized", lines[0])
    assert re.fullmatch(r"118 \(new\)   ( +0\.450 +0\.310)( +0\.700 +0\.688)( +0\.950 +0\.950)", lines[4])
    assert len({len(line) for line in lines[:10]}) == 1
    assert [line[:11] for line in lines[8:10]] == ["all, pooled", "new, pooled"]
    assert re.search(r"bytes +payload +up 2\.94 MB +down 3\.15 MB\n +MQTT +up 2\.96 MB .*\n +wire +up 3\.13 MB", text)
    assert "energy   84.0 J (train 84.0 J)  measured: RAPL" in text
    assert text.endswith("report   out/report.html\nresult   out/result.json\n")


def test_the_calibration_error_has_a_column_where_devices_report_it(ledger: Ledger) -> None:
    fill(ledger)
    for row in ledger.rows(Evaluation, stage="after"):
        ledger.put(replace(row, gaps=(0.0,) * (BINS - 1) + (-0.25 * sum(map(sum, row.confusion)),)))
    lines = closing_table(built(ledger)).splitlines()
    assert lines[1].endswith("accuracy  macro-F1   accuracy  macro-F1    ECE")
    assert re.fullmatch(r"118 \(new\)   ( +0\.450 +0\.310)( +0\.700 +0\.688)( +0\.950 +0\.950 +0\.250)", lines[4])
    assert len({len(line) for line in lines[:10]}) == 1
    _, seen = page(ledger)
    assert re.search(r"118 new 0\.450 0\.310 \S+ 0\.700 0\.688 \S+ 0\.950 0\.950 0\.250", " ".join(seen.text.split()))


def test_the_closing_table_of_a_partial_run_says_what_is_absent(ledger: Ledger) -> None:
    fill(ledger, rounds=1, evaluated=False, energy=False, wire=False)
    text = closing_table(built(ledger, baseline=False))
    assert "no device was evaluated" in text
    assert re.search(r"wire +not counted\nenergy +not measured\n", text)


def test_modelled_joules_are_shown_by_phase_with_spread_source_and_what_they_lack(ledger: Ledger) -> None:
    fill(ledger, energy=False)
    for name in NAMES:
        ledger.put(
            Energy(round=1, device=name, phase="train", joules=10.0, source="model of CPU seconds", measured=False,
                   low=7.0, high=13.0),
            Energy(round=1, device=name, phase="radio", joules=0.06, source="Wi-Fi", measured=False, low=0.03,
                   high=0.12),
        )  # fmt: skip
    ledger.set_absent_energy(NAMES[0], ["radio: without the base power"])
    run = built(ledger)
    data = result.to_json(run)
    assert result.validate(data) == []
    energy, n = data["totals"]["energy_j"], len(NAMES)
    assert energy["by_phase"]["train"] == {
        "value": 10.0 * n, "low": 7.0 * n, "high": 13.0 * n, "source": "modelled: model of CPU seconds"
    }
    assert data["totals"]["absent_energy"] == {"radio: without the base power": 1}
    text = closing_table(run)
    assert "energy   30.2 J [21.1 J to 39.4 J] (train 30.0 J, radio 0.18 J)" in text
    assert "modelled: model of CPU seconds" in text
    assert "modelled: Wi-Fi" in text
    assert f"not in it: radio: without the base power (1 of {n + 1} devices)" in text
    _, seen = page(ledger)
    assert f"{7 * n:.1f} J to {13 * n:.1f} J" in seen.text
    assert "Not in it: radio: without the base power" in seen.text


def test_a_run_without_joules_gives_the_reason(ledger: Ledger) -> None:
    fill(ledger, energy=False)
    for name in (*NAMES, NEW):
        ledger.set_absent_energy(name, ["compute: no sensor"])
    assert re.search(r"energy +not measured\n +not in it: compute: no sensor\n", closing_table(built(ledger)))
    _, seen = page(ledger)
    assert "not measured" in seen.text
    assert "compute: no sensor" in seen.text
    assert "0.00 J" not in seen.text


def test_joules_that_lack_devices_say_so() -> None:
    data: dict[str, Any] = {"source": "measured: RAPL", "phases": {"train": 4.0}, "missing": 2}
    sums = result.Sums(energy_j=Joules(value=4.0, **data))
    run = result.Result(format=1, method="fedavg", seed=0, config={}, environment={}, devices=2, rounds=(),
                        personalization=(), totals=sums)  # fmt: skip
    assert "(2 reports missing)" in closing_table(run)
    assert "(2 reports missing)" in Page(render(result.to_json(run), title="x")).text
