"""An agent's own endpoint for Prometheus: its figures, read by the parser of Prometheus's own client, and what it
refuses."""

from __future__ import annotations

import http.client
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from edge_agent.commands.run import figures_of
from edge_agent.device.process_usage import ProcessUsage
from edge_agent.http import metrics
from edge_agent.http.http_server import HttpServer
from edge_agent.http.metrics import Figures
from edge_agent.rounds.agent import Agent
from fleet_core.base.errors import ConfigError, LinkError
from fleet_core.board.device_settings import Metrics
from fleet_core.protocol.device_messages import Energy, Traffic
from tests.support.brokers import free_port
from tests.support.inprocess import config_text, toy, without_fsync, world
from tests.support.programs import Programs, edge_agent
from tests.support.waiting import PATIENCE_S

FULL = Figures(
    fleet="desk", device="d0", version="0.1.0", connected=True, phase="train",
    traffic=Traffic(10, 20, 30, 40, {"model_down": 5, "graph_down": 1, "update_up": 3}, 2, 1.5),
    usage=ProcessUsage(2.5, 80.0), energy=(Energy("train", 4.5, "ina219", True), Energy("radio", 0.5, "wifi", False)),
    flops=1e9, round=3, served_round=2, accuracy={"before": 0.5, "after": 0.75},
    measures={"after": {"mae": {"load": 0.25}, "f1": {"rain": 0.5}, "alarms": {"quiet": 0.01}}},
    answered=7, last_answer_s=1.7e9,
)
"""The figures of an agent that has measured everything."""


def parsed(page: str) -> dict[str, Metric]:
    return {one.name: one for one in text_string_to_metric_families(page)}


def values(metric: Metric, *labels: str) -> dict[Any, float]:
    return {tuple(sample.labels[name] for name in labels): sample.value for sample in metric.samples}


def ask(server: HttpServer, verb: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
    try:
        connection.request(verb, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent after a whole round."""
    without_fsync(monkeypatch)
    made = world(tmp_path / "w", config_text(devices=1, rounds=1))
    made.start_server()
    found = made.start_agent("d0", toy(0))
    assert made.pump(lambda: made.closed() == 1 and bool(found.evaluations))
    yield found
    made.close()


def test_a_scrape_has_what_the_agent_did(agent: Agent, tmp_path: Path) -> None:
    agent.service.answers(np.zeros((3, 8), np.float32))
    server = metrics.start(Metrics(), lambda: figures_of(agent), print, tmp_path)
    try:
        status, page = ask(server, "GET", "/metrics")
    finally:
        server.stop()
    found = parsed(page)
    assert status == 200
    info, = found["metafleet_agent_info"].samples
    assert (info.labels["fleet"], info.labels["device"]) == ("t", "d0")
    assert values(found["metafleet_agent_round"]) == values(found["metafleet_agent_served_round"]) == {(): 1}
    assert values(found["metafleet_agent_answered_samples"]) == {(): 3}
    assert values(found["metafleet_agent_phase"], "phase")[("idle",)] == 1
    moved = values(found["metafleet_agent_bytes"], "counter", "direction")
    assert moved["payload", "up"] > 0
    assert moved["payload", "down"] > 0
    accuracy = values(found["metafleet_agent_accuracy_ratio"], "stage")
    confusion = next(one.confusion for one in agent.evaluations if one.stage == "after")
    assert accuracy[("after",)] == np.trace(np.array(confusion)) / np.sum(confusion)


def test_every_figure_has_its_base_unit_and_its_labels() -> None:
    page = metrics.text(FULL)
    found = parsed(page)
    assert len(found) == page.count("# TYPE") == 18
    for name, metric in found.items():
        assert metric.documentation.endswith(".")
        assert not re.search(r"_(ms|mib|kb|mb|minutes|percent)$", name)
        assert metric.samples, name
        assert (metric.type == "counter") == metric.samples[0].name.endswith("_total")
    assert values(found["metafleet_agent_bytes"], "counter", "direction") == {
        ("payload", "up"): 3, ("payload", "down"): 6, ("mqtt", "up"): 10, ("mqtt", "down"): 20, ("wire", "up"): 30,
        ("wire", "down"): 40}
    assert values(found["metafleet_agent_energy_joules"], "phase", "source") == {
        ("train", "measured: ina219"): 4.5, ("radio", "modelled: wifi"): 0.5}
    assert values(found["metafleet_agent_mean_absolute_error"], "stage", "output") == {("after", "load"): 0.25}
    assert values(found["metafleet_agent_label_f1_ratio"], "stage", "output") == {("after", "rain"): 0.5}
    assert values(found["metafleet_agent_alarms_ratio"], "stage", "output") == {("after", "quiet"): 0.01}
    assert values(found["metafleet_agent_peak_memory_bytes"]) == {(): 80 * (1 << 20)}
    assert values(found["metafleet_agent_last_answer_timestamp_seconds"]) == {(): 1.7e9}


def test_what_was_not_measured_has_no_sample() -> None:
    found = parsed(metrics.text(Figures("desk", "d0", "0.1.0", False, "idle", Traffic(), ProcessUsage())))
    for name in ("energy_joules", "cpu_seconds", "operations", "round", "connected_seconds", "accuracy_ratio"):
        assert found[f"metafleet_agent_{name}"].samples == []
    assert values(found["metafleet_agent_connected"]) == {(): 0}


def test_a_label_is_escaped() -> None:
    source = 'a "meter"\\of\nmine'
    energy = (Energy("train", 1.0, source, True),)
    found = parsed(metrics.text(Figures("desk", "d0", "1", True, "idle", Traffic(), ProcessUsage(), energy)))
    assert values(found["metafleet_agent_energy_joules"], "source") == {(f"measured: {source}",): 1.0}


@pytest.mark.parametrize(("verb", "path", "host", "status"), [
    ("GET", "/metrics", "pi.example:9465", 200), ("HEAD", "/metrics", "10.0.0.7", 200), ("GET", "/", "localhost", 404),
    ("POST", "/metrics", "localhost", 405), ("GET", "/metrics", "evil.example", 421),
])
def test_only_the_page_and_only_under_the_devices_names(
    verb: str, path: str, host: str, status: int, tmp_path: Path
) -> None:
    server = metrics.start(Metrics(names=("pi.example",)), lambda: FULL, print, tmp_path)
    try:
        assert ask(server, verb, path, **{"Host": host, "Content-Length": "0"})[0] == status
    finally:
        server.stop()


def test_with_a_token_nothing_is_told_without_it(tmp_path: Path) -> None:
    server = metrics.start(Metrics(token="metrics.token"), lambda: FULL, print, tmp_path)
    token = (tmp_path / "metrics.token").read_text().strip()
    assert (tmp_path / "metrics.token").stat().st_mode & 0o777 == 0o600
    try:
        for shown in ("", f"Bearer {token}x", f"Bearer {token[:-1]}", "Bearer ", f"Basic {token}"):
            status, page = ask(server, "GET", "/metrics", Authorization=shown)
            assert (status, "metafleet_agent" in page) == (401, False)
        assert ask(server, "GET", "/elsewhere")[0] == 401, "nor what there is"
        assert ask(server, "GET", "/metrics", Authorization=f"Bearer {token}")[0] == 200
    finally:
        server.stop()
    (tmp_path / "metrics.token").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        metrics.start(Metrics(token="metrics.token"), lambda: FULL, print, tmp_path)


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    server = metrics.start(Metrics(), lambda: FULL, print, tmp_path)
    try:
        with pytest.raises(LinkError, match="cannot listen"):
            metrics.start(Metrics(port=server.port), lambda: FULL, print, tmp_path)
    finally:
        server.stop()


@pytest.mark.slow
def test_an_agent_answers_scrapes_while_it_waits_for_its_broker(
    finished: Path, tmp_path: Path, programs: Programs
) -> None:
    home, port = Path(shutil.copytree(finished / "d1", tmp_path / "d1")), free_port()
    with (home / "device.toml").open("a") as file:
        file.write(f"[metrics]\nport = {port}\n")
    nobody = f"mqtt://127.0.0.1:{free_port()}"
    program = programs.start(*edge_agent("run", "--home", home, "--broker", nobody, "--connect-s", "600"))
    program.wait_for(f"metrics at http://127.0.0.1:{port}/metrics")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = parsed(answer.read().decode())
    assert values(found["metafleet_agent_connected"]) == {(): 0}
    assert values(found["metafleet_agent_served_round"]) == {(): 2}
    program.process.send_signal(signal.SIGTERM)
    program.exit_code()
