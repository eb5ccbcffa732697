"""``GET /metrics``: an agent's own figures in Prometheus's text format, computed at each scrape.

Names and units follow https://prometheus.io/docs/practices/naming, the form is version 0.0.4 of
https://prometheus.io/docs/instrumenting/exposition_formats. A figure that was not measured has no sample. Prometheus
tells devices apart by ``instance``; ``metafleet_agent_info`` has the device's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_agent.device.process_usage import ProcessUsage
from edge_agent.http.access import Access
from edge_agent.http.client_limits import Limits
from edge_agent.http.http_messages import Refused, Request, Response, as_error
from edge_agent.http.http_server import HttpServer
from fleet_core.board.device_settings import Metrics
from fleet_core.link.bearer_token import token_in
from fleet_core.link.host_names import is_ours, of_this_machine
from fleet_core.protocol.device_messages import Energy, Traffic

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LIMITS = Limits(connections=8, body_bytes=0, bodies_bytes=0)
OPEN = Access()
PHASES = ("idle", "train", "upload", "refused", "failed")
Sample = tuple[Mapping[str, str], float | None]


@dataclass(frozen=True)
class Figures:
    """An agent's figures. traffic, energy, usage, flops: since its start, as in ``Report``. round: of the last
    manifest. served_round: of the model that answers; None without one. accuracy: by stage, of the last evaluation on
    the device's test samples; measures: in place of it, by stage, measure and output, of a task without classes.
    answered: samples since the start. last_answer_s: Unix time of the last answer."""

    fleet: str
    device: str
    version: str
    connected: bool
    phase: str
    traffic: Traffic
    usage: ProcessUsage
    energy: tuple[Energy, ...] = ()
    flops: float | None = None
    round: int | None = None
    served_round: int | None = None
    accuracy: Mapping[str, float] | None = None
    measures: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
    answered: int = 0
    last_answer_s: float | None = None


def text(figures: Figures) -> str:
    """The whole page."""
    return "".join(_family(*family) for family in _families(figures))


def _families(one: Figures) -> Iterator[tuple[str, str, str, Iterable[Sample]]]:
    """(name, type, help, samples) of each metric."""
    traffic, plain = one.traffic, dict[str, str]()
    yield ("metafleet_agent_info", "gauge", "The device and its program.",
           [({"fleet": one.fleet, "device": one.device, "version": one.version}, 1)])
    yield "metafleet_agent_connected", "gauge", "1 while connected to the broker.", [(plain, int(one.connected))]
    yield ("metafleet_agent_connected_seconds_total", "counter", "Time with a connection to the broker.",
           [(plain, traffic.connected_s)])
    yield ("metafleet_agent_phase", "gauge", "1 for the phase that the agent is in.",
           [({"phase": phase}, int(phase == one.phase)) for phase in PHASES])
    yield "metafleet_agent_round", "gauge", "The round of the last manifest.", [(plain, one.round)]
    yield "metafleet_agent_served_round", "gauge", "The round of the model that answers.", [(plain, one.served_round)]
    yield ("metafleet_agent_accuracy_ratio", "gauge", "Accuracy on the device's own test samples.",
           [({"stage": stage}, value) for stage, value in (one.accuracy or {}).items()])
    for name, about, measure in (
        ("metafleet_agent_mean_absolute_error", "On the device's own test samples, in the output's unit.", "mae"),
        ("metafleet_agent_alarms_ratio", "Share of the device's own test samples that raise an alarm.", "alarms"),
        ("metafleet_agent_label_f1_ratio", "F1 of each label on the device's own test samples.", "f1"),
    ):
        yield (name, "gauge", about,
               [({"stage": stage, "output": output}, value) for stage, found in (one.measures or {}).items()
                for output, value in found.get(measure, {}).items()])
    yield "metafleet_agent_answered_samples_total", "counter", "Samples that were answered.", [(plain, one.answered)]
    yield ("metafleet_agent_last_answer_timestamp_seconds", "gauge", "When the agent last answered.",
           [(plain, one.last_answer_s)])
    yield ("metafleet_agent_bytes_total", "counter",
           "Bytes: of encoded models and updates (payload), through the MQTT socket, or on the wire.",
           [({"counter": counter, "direction": way}, count) for counter, way, count in _bytes(traffic)])
    yield ("metafleet_agent_retransmitted_bytes_total", "counter", "TCP payload that the device sent again.",
           [(plain, traffic.retransmitted)])
    yield ("metafleet_agent_energy_joules_total", "counter", "Joules by phase, measured or modelled.",
           [({"phase": found.phase, "source": f"{'measured' if found.measured else 'modelled'}: {found.source}"},
             found.joules) for found in one.energy])
    yield ("metafleet_agent_cpu_seconds_total", "counter", "Processor time of the agent and its children.",
           [(plain, one.usage.cpu_s)])
    yield ("metafleet_agent_peak_memory_bytes", "gauge", "Peak memory of the agent and its children.",
           [(plain, None if one.usage.peak_mib is None else one.usage.peak_mib * (1 << 20))])
    yield ("metafleet_agent_operations_total", "counter", "Floating-point operations of training.",
           [(plain, one.flops)])


def _bytes(traffic: Traffic) -> Iterator[tuple[str, str, int | None]]:
    """(counter, direction, bytes)."""
    for way, end in (("up", "_up"), ("down", "_down")):
        yield "payload", way, sum(count for kind, count in traffic.payload.items() if kind.endswith(end))
    yield from (("mqtt", "up", traffic.mqtt_up), ("mqtt", "down", traffic.mqtt_down))
    yield from (("wire", "up", traffic.wire_up), ("wire", "down", traffic.wire_down))


def _family(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    """One metric's lines; its head alone where no sample has a value."""
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        if value is not None:
            named = ",".join(f'{label}="{_escaped(content)}"' for label, content in labels.items())
            lines.append(f"{name}{{{named}}} {value!r}" if named else f"{name} {value!r}")
    return "\n".join([*lines, ""])


def _escaped(content: str) -> str:
    return content.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class MetricsPage:
    """figures: called at each scrape, in a thread of its own. names: host names by which a scraper may reach the
    device, beside ``localhost`` and any address. access: what a scraper has to show."""

    def __init__(self, figures: Callable[[], Figures], names: Iterable[str] = (), access: Access = OPEN):
        self._figures, self._names = figures, {"localhost", *(name.lower() for name in names)}
        self._access = access

    def answer(self, request: Request) -> Response:
        head = request.head
        if not is_ours(head.headers.get("host", "localhost"), self._names):
            return as_error(Refused(421, f"this device is not reached by the name '{head.headers['host'][:100]}'; "
                                         "[metrics] names in device.toml allows names"))
        try:
            self._access.check(head)
        except Refused as refused:
            return as_error(refused)
        if head.path != "/metrics":
            return as_error(Refused(404, "there is only /metrics here"))
        if head.method not in ("GET", "HEAD"):
            return as_error(Refused(405, f"{head.method[:20]} is not for /metrics, expected GET",
                                    {"Allow": "GET, HEAD"}))
        return Response(200, text(self._figures()).encode(), {"Content-Type": CONTENT_TYPE})


def start(settings: Metrics, figures: Callable[[], Figures], log: Callable[[str], None], home: Path) -> HttpServer:
    """Starts a server of the page. home: the device's, for its token. Raises LinkError if it cannot listen, ConfigError
    and StateError for its token."""
    access = OPEN if settings.token is None else Access(token_in(home / settings.token))
    page = MetricsPage(figures, of_this_machine(*settings.names), access)
    server = HttpServer(page.answer, settings.host, settings.port, limits=LIMITS, log=log).start()
    log(f"metrics at {server.url}/metrics")
    return server
