"""What the agent has spent since its start: payload bytes by kind, floating-point operations, joules by phase, CPU
seconds, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from edge_agent.device.process_usage import ProcessUsage
from fleet_core.link import byte_counters
from fleet_core.power.background_sampling import repeating
from fleet_core.power.joules_by_phase import JoulesByPhase, Work
from fleet_core.power.meter import Figure, Meter
from fleet_core.power.radio import RadioModel
from fleet_core.protocol import device_messages
from fleet_core.protocol.device_messages import MAX_ABSENT, MAX_SOURCE, Energy
from fleet_core.protocol.round_messages import Cost


class AgentCosts:
    """Counts from the agent's start. Without a meter energy is absent, never 0. radio: models the joules of bytes.
    usage(): CPU seconds and peak MiB of the agent's processes; absent where several agents share a process."""

    def __init__(
        self, meter: Meter | None = None, radio: RadioModel | None = None,
        usage: Callable[[], ProcessUsage] = ProcessUsage,
    ):
        self.usage = usage
        self._book = JoulesByPhase(meter, radio)
        self._open: dict[str, tuple[ExitStack, Work]] = {}
        self._payload: dict[str, int] = {}
        self._before: dict[str, float] = {}
        self._last: dict[str, Figure] = {}
        self.flops: float | None = None

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Reads the meter every second while the context lasts."""
        with repeating(self._book.update) if self._book.metered else nullcontext():
            yield

    def payload(self, kind: str, count: int) -> None:
        """Adds ``count`` bytes of payload ``kind`` (``model_down``, ``update_up``, …)."""
        self._payload[kind] = self._payload.get(kind, 0) + count
        if kind.endswith("_up"):
            self._book.moved(up_bytes=count)
        else:
            self._book.moved(down_bytes=count)

    def begin(self, phase: str) -> None:
        """Starts ``train``, ``adapt`` or ``serve``, which may last over many steps of the loop."""
        stack = ExitStack()
        self._open[phase] = (stack, stack.enter_context(self._book.phase(phase)))
        known = self._book.figures().get(phase)
        self._before[phase] = 0.0 if known is None else known.joules

    def end(self, phase: str, flops: float | None = None) -> None:
        stack, work = self._open.pop(phase)
        if flops is not None:
            work.flops = flops
            self.flops = (self.flops or 0.0) + flops
        stack.close()
        figure = self._book.figures().get(phase)
        if figure is not None:
            self._last[phase] = replace(figure, joules=figure.joules - self._before[phase])

    def energy(self) -> tuple[Energy, ...]:
        self._book.update()
        return tuple(
            Energy(phase, figure.joules, figure.source[:MAX_SOURCE], figure.measured, figure.spread)
            for phase, figure in self._book.figures().items()
        )

    def absent_terms(self) -> tuple[str, ...]:
        """"term: reason" for everything that the joules do not include."""
        return tuple(reason[:MAX_SOURCE] for reason in self._book.absent_terms())[:MAX_ABSENT]

    def traffic(self, link: byte_counters.Traffic) -> device_messages.Traffic:
        return device_messages.Traffic(
            link.mqtt_sent, link.mqtt_received, link.wire_sent, link.wire_received, dict(self._payload),
            link.retransmitted, link.connected_s,
        )

    def cost(self, payload_bytes: int, job: Mapping[str, Any]) -> Cost:
        """One update's: its bytes, the trainer's CPU seconds and operations, the joules of its training."""
        flops, joules = job.get("flops"), self._last.get("train")
        return Cost(
            payload_bytes, float(job.get("cpu_s", 0.0)), None if flops is None else float(flops),
            None if joules is None else joules.plain(),
        )
