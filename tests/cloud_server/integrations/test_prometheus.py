"""``metafleet metrics`` and the dashboard: names, units, what is absent, and every query against the real output."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from cloud_server.commands import cli
from cloud_server.integrations import prometheus
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Energy, Usage
from cloud_server.records.fleet_folder import Fleet
from edge_agent.http import metrics
from fleet_core.base.errors import LinkError
from tests.edge_agent.http.test_metrics import FULL
from tests.support.cli import runner
from tests.support.programs import Programs, metafleet
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def fleet(finished: Path, tmp_path: Path) -> Fleet:
    shutil.copytree(finished / "fleet", tmp_path / "fleet")
    return Fleet.load(tmp_path / "fleet")


def scraped(fleet: Fleet) -> dict[str, Metric]:
    port, end = prometheus.serve(fleet, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
    finally:
        end()


def values(metric: Metric, *labels: str) -> dict[Any, float]:
    return {tuple(sample.labels[name] for name in labels): sample.value for sample in metric.samples}


def test_the_endpoint_has_the_ledgers_figures(fleet: Fleet) -> None:
    found = scraped(fleet)
    assert values(found["metafleet_rounds_closed"]) == {(): 2}
    assert values(found["metafleet_aggregator_up"]) == {(): 0}
    assert values(found["metafleet_updates"], "status") == {("counted",): 2, ("refused",): 0, ("late",): 0}
    assert values(found["metafleet_device_accuracy_ratio"], "device", "stage").keys() == {("d0", "after"),
                                                                                          ("d1", "after")}
    moved = values(found["metafleet_device_bytes"], "device", "counter", "direction")
    assert moved["d0", "payload", "up"] > 0
    assert moved["d1", "payload", "up"] == 0
    with fleet.lock():
        assert values(scraped(fleet)["metafleet_aggregator_up"]) == {(): 1}


def test_scrapes_that_wait_for_another_one_do_not_read_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    collector, first, go_on = prometheus.FleetCollector(fleet), threading.Event(), threading.Event()
    reads: list[str] = []
    asked: list[float] = []

    def now() -> float:
        asked.append(time.monotonic())
        return asked[-1]

    def read() -> Iterator[Metric]:
        reads.append(threading.current_thread().name)
        first.set()
        go_on.wait(PATIENCE_S)
        yield Metric(f"read_{len(reads)}", "", "gauge")

    monkeypatch.setattr(collector, "_read", read)
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=now))
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(collector.collect)]
        assert first.wait(PATIENCE_S)
        answers += [pool.submit(collector.collect) for _ in range(4)]
        until(lambda: len(asked) == 5)
        go_on.set()
        assert {metric.name for answer in answers for metric in answer.result(PATIENCE_S)} == {"read_1"}
    assert len(reads) == 1
    assert [metric.name for metric in collector.collect()] == ["read_2"]


def test_what_was_not_measured_has_no_sample(fleet: Fleet) -> None:
    found = scraped(fleet)
    assert found["metafleet_device_energy_joules"].samples == []
    assert ("d1",) not in values(found["metafleet_device_operations"], "device")


def test_names_have_base_units_and_help(fleet: Fleet) -> None:
    found = scraped(fleet)
    assert len(found) > 20
    for name, metric in found.items():
        assert name.startswith("metafleet_")
        assert metric.documentation.endswith(".")
        assert not re.search(r"_(ms|mib|kb|mb|minutes|percent)$", name)


@pytest.fixture
def full(fleet: Fleet) -> dict[str, Metric]:
    """The metrics of a fleet whose devices reported everything."""
    with Ledger(fleet.ledger_path) as ledger:
        ledger.put(Energy(round=1, device="d0", phase="train", joules=2.5, source="meter", measured=True),
                   Usage(round=1, device="d0", cpu_s=1.5, peak_mib=80.0))
    return scraped(fleet)


def test_joules_have_their_source(full: dict[str, Metric]) -> None:
    assert values(full["metafleet_device_energy_joules"], "device", "phase", "source") == {
        ("d0", "train", "measured: meter"): 2.5}
    assert values(full["metafleet_device_peak_memory_bytes"], "device")[("d0",)] == 80 * (1 << 20)


def queries() -> Iterator[str]:
    for panel in json.loads(prometheus.dashboard())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def test_every_query_of_the_dashboard_finds_samples(full: dict[str, Metric]) -> None:
    own = text_string_to_metric_families(metrics.text(FULL))
    samples = [sample for metric in (*full.values(), *own) for sample in metric.samples]
    asked = list(queries())
    assert len(asked) > 20
    for query in asked:
        found = re.findall(r"(metafleet_\w+)(?:\{([^}]*)\})?", query)
        assert found, query
        for name, matchers in found:
            wanted = re.findall(r'(\w+)(!?=)"([^"]*)"', matchers)
            matching = [s for s in samples if s.name == name
                        and all((s.labels[label] == value) == (sign == "=") for label, sign, value in wanted)]
            assert matching, query
            by = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
            assert by <= matching[0].labels.keys(), query


def test_panels_do_not_overlap_and_ask_for_the_chosen_source() -> None:
    board = json.loads(prometheus.dashboard())
    places = [(panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y) for panel in board["panels"]
              for x in range(panel["gridPos"]["w"]) for y in range(panel["gridPos"]["h"])]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    sources = {panel["datasource"]["uid"] for panel in board["panels"] if panel["type"] != "row"}
    assert sources == {f"${{{board['__inputs'][0]['name']}}}"}


def test_a_port_in_use_is_told(fleet: Fleet) -> None:
    port, end = prometheus.serve(fleet, "127.0.0.1", 0)
    with pytest.raises(LinkError, match="cannot listen at this address"):
        prometheus.serve(fleet, "127.0.0.1", port)
    end()


@pytest.mark.slow
def test_the_command_answers_until_it_is_stopped(fleet: Fleet, programs: Programs) -> None:
    program = programs.start(*metafleet("metrics", fleet.folder, "--port", "0"))
    program.wait_for("/metrics")
    with urllib.request.urlopen(program.text().strip()) as answer:
        assert b"metafleet_rounds_closed_total 2.0" in answer.read()
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0


def test_the_command_prints_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = runner(monkeypatch, capsys, "metafleet", cli.main)("metrics", tmp_path, "--dashboard")
    assert (ended.code, json.loads(ended.out)["title"]) == (0, "Metafleet")
