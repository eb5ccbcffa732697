"""``metafleet metrics``: a fleet's figures for Prometheus, read from the ledger at each scrape.

Names and units follow https://prometheus.io/docs/practices/naming: base units, ``_total`` for what only grows. A figure
that was not measured has no sample.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import resources

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes
from cloud_server.ledger.ledger_tables import Device, Evaluation, Round, TaskEvaluation
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results import device_costs
from cloud_server.results.device_costs import DeviceCosts
from cloud_server.results.result import score_of, task_score
from fleet_core import __version__
from fleet_core.base.errors import LinkError

COUNTERS: tuple[tuple[str, Callable[[DeviceCosts], Bytes | None]], ...] = (
    ("payload", lambda costs: costs.payload_bytes), ("mqtt", lambda costs: costs.mqtt_bytes),
    ("wire", lambda costs: costs.wire_bytes),
)


class FleetCollector(Collector):
    """Reads the ledger of ``fleet`` at each scrape. Scrapes may be in any thread; one reads at a time, and those that
    wait meanwhile get the same figures."""

    def __init__(self, fleet: Fleet):
        self._fleet = fleet
        self._reading, self._found, self._found_at = threading.Lock(), list[Metric](), -math.inf

    def collect(self) -> list[Metric]:
        asked = time.monotonic()
        with self._reading:
            if self._found_at < asked:
                self._found = list(self._read())
                self._found_at = time.monotonic()
            return self._found

    def _read(self) -> Iterator[Metric]:
        with Ledger(self._fleet.ledger_path, create=False) as ledger:
            yield from self._of_fleet(ledger)
            yield from _of_rounds(ledger)
            yield from _of_devices([one for one in ledger.devices() if one.status == "enrolled"])
            yield from _of_evaluations(ledger)
            yield from _of_costs(device_costs.of_ledger(ledger))

    def _of_fleet(self, ledger: Ledger) -> Iterator[Metric]:
        config = self._fleet.config.fleet
        yield InfoMetricFamily("metafleet_fleet", "The fleet and what it learns.", {
            "fleet": config.name, "method": self._fleet.method.name, "version": __version__})
        yield GaugeMetricFamily("metafleet_aggregator_up", "1 while an aggregator works on the fleet's folder.",
                                int(self._fleet.running()))
        yield GaugeMetricFamily("metafleet_rounds_planned", "Rounds in all, as fleet.toml says.", config.rounds)
        yield GaugeMetricFamily("metafleet_stalled", "1 while the open round does not go on.",
                                int(bool(ledger.fact("stalled"))))


def _of_rounds(ledger: Ledger) -> Iterator[Metric]:
    last, statuses = ledger.newest(Round, status="closed"), Counter[str]()
    yield CounterMetricFamily("metafleet_rounds_closed", "Closed rounds.", value=ledger.closed_count())
    yield GaugeMetricFamily("metafleet_round_open", "1 while a round is open.", int(bool(ledger.rounds("open"))))
    for fates in ledger.fates(by="device").values():
        statuses.update(fates)
    yield _family(CounterMetricFamily("metafleet_updates", "Updates that arrived.", labels=["status"]),
                  (((status,), statuses[status]) for status in ("counted", "refused", "late")))
    if last is not None:
        row = ledger.rows(Round, round=last)[0]
        for name, about, value in (
            ("metafleet_round_loss", "Mean training loss of the last closed round.", row.loss),
            ("metafleet_round_duration_seconds", "Duration of the last closed round.", row.seconds),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, about, value)


def _of_devices(enrolled: list[Device]) -> Iterator[Metric]:
    yield _family(GaugeMetricFamily("metafleet_device_up", "1 while the device is connected.", labels=["device"]),
                  (((one.name,), int(one.state == "on")) for one in enrolled))
    yield _family(GaugeMetricFamily("metafleet_device_last_seen_timestamp_seconds",
                                    "When the device was last heard.", labels=["device"]),
                  (((one.name,), one.last_seen) for one in enrolled))
    yield _family(GaugeMetricFamily("metafleet_device_info", "The device's program, and whether it only answers.",
                                    labels=["device", "version", "new"]),
                  (((one.name, one.version, str(one.new).lower()), 1) for one in enrolled))


def _of_evaluations(ledger: Ledger) -> Iterator[Metric]:
    """Each device's last evaluation of each stage."""
    newest = {(one.device, one.stage): score_of(one) for one in ledger.latest(Evaluation)}
    for name, about, figure in (
        ("metafleet_device_accuracy_ratio", "Accuracy on the device's own test samples.", "accuracy"),
        ("metafleet_device_macro_f1_ratio", "Macro-F1 on the device's own test samples.", "macro_f1"),
        ("metafleet_device_calibration_error_ratio", "Expected calibration error on its own test samples.",
         "calibration_error"),
    ):
        yield _family(GaugeMetricFamily(name, about, labels=["device", "stage"]),
                      ((key, value) for key, one in newest.items() if (value := getattr(one, figure)) is not None))
    scores = {(one.device, one.stage): task_score([one]) for one in ledger.latest(TaskEvaluation)}
    for name, about, measure in (
        ("metafleet_device_mean_absolute_error", "On the device's own test samples, in the output's unit.", "mae"),
        ("metafleet_device_r_squared", "R² on the device's own test samples.", "r2"),
        ("metafleet_device_label_f1_ratio", "F1 of each label on the device's own test samples.", "f1"),
        ("metafleet_device_micro_f1_ratio", "F1 of all labels together on the device's own test samples.", "micro_f1"),
        ("metafleet_device_alarms_ratio", "Share of its own test samples that raise an alarm.", "alarms"),
        ("metafleet_device_auroc", "Chance that an anomaly has a higher score than a quiet sample.", "auroc"),
    ):
        yield _family(GaugeMetricFamily(name, about, labels=["device", "stage", "output"]),
                      (((*key, output), value) for key, score in scores.items() if score is not None
                       for output, value in score.measures.get(measure, {}).items()))


def _of_costs(costs: Iterable[DeviceCosts]) -> Iterator[Metric]:
    costs = list(costs)
    moved = ((one.device, counter, found) for one in costs for counter, of in COUNTERS if (found := of(one)))
    yield _family(
        CounterMetricFamily("metafleet_device_bytes", "Bytes: of encoded models and updates (payload), through the "
                            "MQTT socket, or on the wire.", labels=["device", "counter", "direction"]),
        (((device, counter, way), value) for device, counter, found in moved
         for way, value in (("up", found.up), ("down", found.down))),
    )
    yield _family(
        CounterMetricFamily("metafleet_device_energy_joules", "Joules by phase, measured or modelled.",
                            labels=["device", "phase", "source"]),
        (((one.device, phase, found.source), found.value) for one in costs if one.energy_j is not None
         for phase, found in one.energy_j.by_phase.items()),
    )
    yield _family(CounterMetricFamily("metafleet_device_counted_updates", "Rounds that counted the device's update.",
                                      labels=["device"]),
                  (((one.device,), one.rounds) for one in costs))
    for name, about, figure in (
        ("metafleet_device_operations", "Floating-point operations of training.", "flops"),
        ("metafleet_device_cpu_seconds", "Processor time of the agent and its children.", "cpu_s"),
        ("metafleet_device_connected_seconds", "Time with a connection to the broker.", "connected_s"),
        ("metafleet_device_retransmitted_bytes", "TCP payload that the device sent again.", "retransmitted_bytes"),
    ):
        yield _family(CounterMetricFamily(name, about, labels=["device"]),
                      (((one.device,), getattr(one, figure)) for one in costs))
    yield _family(GaugeMetricFamily("metafleet_device_peak_memory_bytes", "Peak memory of the agent and its children.",
                                    labels=["device"]),
                  (((one.device,), None if one.peak_mib is None else one.peak_mib * (1 << 20)) for one in costs))


def _family(
    family: CounterMetricFamily | GaugeMetricFamily, samples: Iterable[tuple[tuple[str, ...], float | None]]
) -> Metric:
    """The family with the samples that have a value."""
    for labels, value in samples:
        if value is not None:
            family.add_metric(list(labels), value)
    return family


def registry(fleet: Fleet) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(FleetCollector(fleet))
    return made


def serve(fleet: Fleet, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Answers scrapes at ``http://host:port/metrics`` in a thread. Returns (the port, a function that ends it). Raises
    LinkError if it is not possible to listen there."""
    try:
        server, thread = start_http_server(port, host, registry(fleet))
    except OSError as error:
        raise LinkError(f"cannot listen at this address: {error.strerror}", where=f"{host}:{port}",
                        hint="choose another --port") from error

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, end


def dashboard() -> str:
    """A dashboard for Grafana, as JSON to import; it asks for the data source when it is imported."""
    return (resources.files("cloud_server.integrations") / "grafana.json").read_text(encoding="utf-8")
