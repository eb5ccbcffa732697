"""Answers over HTTP: a device's service behind the Open Inference Protocol, in its agent or as ``edge-agent serve``.

``edge-agent serve`` needs neither a broker nor torch. It answers with the model on the device's disk, and follows the
changes that ``edge-agent run`` or ``edge-agent personalize`` makes there.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_agent.connection.alarm_senders import hearing_alarms
from edge_agent.http.access import CERTIFICATE, TOKEN, access_of
from edge_agent.http.client_limits import Limits
from edge_agent.http.http_server import HttpServer
from edge_agent.http.inference_protocol import Facts, InferenceProtocol
from edge_agent.inference.service import Service, service_of
from fleet_core.base import processes
from fleet_core.base.errors import FleetError
from fleet_core.board import allocator
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.link.host_names import is_loopback, of_this_machine
from fleet_core.model.layout import Layout
from fleet_core.protocol.device_messages import Answer
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel

if TYPE_CHECKING:
    from edge_agent.inference.device_api import Device

CHECK_S = 0.5
BEYOND_PER_S = 50.0
"""Requests per second of a client beyond this machine, unless device.toml sets another number."""


class ServedModel:
    """The service as the protocol's model, named as the fleet. Several threads call it."""

    def __init__(self, name: str, service: Service):
        self.name, self._service = name, service

    def facts(self) -> Facts | None:
        now = self._service.answering
        if now is None:
            return self._not_ready()
        spec = now.layout.sample
        values, labels = outputs_of(now.layout)
        return Facts(tuple(spec.shape), spec.dtype, now.classes, now.round, now.detects_unknown, now.graph,
                     spec=spec, values=values, labels=labels, scores=isinstance(now.layout.task, Anomaly))

    def _not_ready(self) -> Facts | None:
        """The facts of a served model that cannot answer yet, perhaps because it needs labelled samples."""
        try:
            served = self._service.stored.served()
        except FleetError:
            return None
        spec = served.graph.layout.sample
        classes = served.graph.layout.classes
        values, labels = outputs_of(served.graph.layout)
        return Facts(tuple(spec.shape), spec.dtype, classes, served.weights.round, unknown=False, ready=False,
                     spec=spec, values=values, labels=labels,
                     scores=isinstance(served.graph.layout.task, Anomaly))

    def held_back(self) -> Mapping[str, Any]:
        try:
            found = self._service.held_back()
        except FleetError:  # the recording cannot be read; the model answers without it
            return {}
        return {} if found is None else {"samples": found.samples, **found.figures}

    def calibration_error(self) -> float | None:
        return self._service.calibration_error

    def answer(self, x: np.ndarray[Any, Any]) -> Answer:
        return self._service.answers(x)

    def learn(
        self, x: np.ndarray[Any, Any], labels: Sequence[str] | np.ndarray[Any, Any], *, new: bool
    ) -> Mapping[str, Any]:
        from edge_agent.inference import relearn  # not loaded by a device that only answers

        if isinstance(labels, np.ndarray):
            return relearn.learn_targets(self._service, x, labels)
        return relearn.learn(self._service, x, labels, new=new)

    def _device(self) -> Device:
        from edge_agent.inference.device_api import Device  # as above

        return Device(self._service.stored.home.folder, self._service)

    def unlabelled(self) -> Sequence[Mapping[str, Any]]:
        return [one.plain for one in self._device().unlabelled()]

    def unlabelled_sample(self, name: str) -> np.ndarray[Any, Any]:
        return self._device().sample(name)

    def label(self, name: str, label: str | Sequence[float] | Sequence[str], *, new: bool) -> Mapping[str, Any]:
        device = self._device()
        device.label(name, label, new_class=new)
        key = "label" if isinstance(label, str) else "labels" if device.labels else "target"
        labelled = {"id": name, key: label}
        try:
            return {**labelled, "personalization": device.personalize()}
        except FleetError as error:
            return {**labelled, "counts_later": str(error).splitlines()[0]}


def outputs_of(layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(names of the numbers, names of the labels) that a model answers with; empty for classes."""
    names = layout.outputs or ()
    return ((), names) if isinstance(layout.task, MultiLabel) else (names, ())


def start(home: Path, settings: Settings, service: Service, log: Callable[[str], None]) -> HttpServer:
    """Starts a server for ``service``. Raises LinkError if it cannot listen, and as ``access_of``."""
    allocator.share()
    name, address = settings.device.fleet, settings.serve
    names = of_this_machine(settings.device.name, *address.names)
    access = access_of(home, address, names)
    protocol = InferenceProtocol(ServedModel(name, service), names, access.check)
    rate = address.requests_per_s or (math.inf if is_loopback(address.host) else BEYOND_PER_S)
    limits = Limits(requests_per_s=rate)
    server = HttpServer(protocol.answer, address.host, address.port, limits=limits, tls=access.tls, log=log).start()
    log(f"answers at {server.url}/v2/models/{name}")
    if access.token is not None:
        log(f"a client needs the token in {home / (address.token or TOKEN)}"
            + (f", and trusts {home / (address.certificate or CERTIFICATE)}" if access.tls else ""))
    elif not is_loopback(address.host):
        log("open to everyone: whoever reaches this port can ask for answers and add labelled samples")
    return server


class Follower:
    """Follows the changes that other processes make on the disk; logs each problem once."""

    def __init__(self, service: Service, log: Callable[[str], None]):
        self._service, self._log = service, log
        self._problem = ""

    def check(self) -> None:
        try:
            changed, problem = self._service.follow(), ""
            if changed:
                allocator.trim()
        except FleetError as error:
            changed, problem = False, str(error)
        if problem and problem != self._problem:
            self._log(problem)
        self._problem = problem
        now = self._service.answering
        if changed and now is not None:
            self._log(f"answers from round {now.round}, personalization: {now.how}")


def serve(home: Path, settings: Settings, *, stopped: Callable[[], bool], log: Callable[[str], None]) -> None:
    """Answers until ``stopped``, and then finishes the requests in progress."""
    allocator.keep_freed()
    service = service_of(home, settings)
    follower = Follower(service, log)
    follower.check()
    with hearing_alarms(home, settings, service, log):
        server = start(home, settings, service, log)
        try:
            if service.answering is None:
                log("there is no model yet: 'edge-agent run' fetches it")
            while not stopped():
                time.sleep(CHECK_S)
                follower.check()
        finally:
            server.stop()


def main(arguments: list[str]) -> None:
    """arguments: ``--home HOME HOST PORT``, from ``edge-agent serve``, and ``--open``."""
    _, home, host, port, *more = arguments
    with processes.until_signal() as stopped:
        settings = settings_of(Path(home)).listening(host, int(port), open="--open" in more)
        serve(Path(home), settings, stopped=stopped, log=processes.say)


if __name__ == "__main__":
    processes.guarded(lambda: main(sys.argv[1:]))
