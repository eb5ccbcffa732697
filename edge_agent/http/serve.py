"""Answers over HTTP: a device's service behind the Open Inference Protocol, in its agent or as ``edge-agent serve``.

The process of ``edge-agent serve`` needs neither a broker nor torch. It answers from what is on the device's disk, and
takes up what ``edge-agent run`` or ``edge-agent personalize`` puts there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.http.http_server import HttpServer
from edge_agent.http.inference_protocol import Facts, InferenceProtocol
from edge_agent.inference.service import Service, service_of
from fleet_core.base import processes
from fleet_core.base.errors import FleetError
from fleet_core.board import allocator
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.protocol.device_messages import Answer

LOOK_S = 0.5
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServedModel:
    """The service as the protocol's one model, named as the fleet. Called by several threads."""

    def __init__(self, name: str, service: Service):
        self.name, self._service = name, service

    def facts(self) -> Facts | None:
        now = self._service.answering
        if now is None:
            return self._waiting()
        spec = now.layout.input
        return Facts(tuple(spec.shape), spec.dtype, now.classes, now.round, now.detects_unknown, now.graph)

    def _waiting(self) -> Facts | None:
        """Of a model that was served and answers nothing yet: labelled samples may be what it waits for."""
        try:
            served = self._service.stored.served()
        except FleetError:
            return None
        spec = served.graph.layout.input
        classes = served.graph.layout.classes
        return Facts(tuple(spec.shape), spec.dtype, classes, served.weights.round, unknown=False, ready=False)

    def answer(self, x: np.ndarray[Any, Any]) -> Answer:
        return self._service.answers(x)

    def learn(self, x: np.ndarray[Any, Any], labels: Sequence[str], *, new: bool) -> Mapping[str, Any]:
        from edge_agent.inference import relearn  # a device that only answers is spared it

        return relearn.learn(self._service, x, labels, new=new)


def start(settings: Settings, service: Service, log: Callable[[str], None]) -> HttpServer:
    """A server for ``service``, which answers from now on. Raises LinkError where it cannot listen."""
    allocator.share()
    name, place = settings.device.fleet, settings.serve
    protocol = InferenceProtocol(ServedModel(name, service))
    server = HttpServer(protocol.answer, place.host, place.port, log=log).start()
    log(f"answers at {server.url}/v2/models/{name}")
    if place.host not in LOOPBACK:
        log("that is plain HTTP: whoever reaches this port may ask, and add labelled samples")
    return server


class Follower:
    """Takes up what other processes put on the disk; says what is wrong with it once."""

    def __init__(self, service: Service, log: Callable[[str], None]):
        self._service, self._log = service, log
        self._said = ""

    def look(self) -> None:
        try:
            changed, said = self._service.follow(), ""
            if changed:
                allocator.trim()
        except FleetError as error:
            changed, said = False, str(error)
        if said and said != self._said:
            self._log(said)
        self._said = said
        now = self._service.answering
        if changed and now is not None:
            self._log(f"answers from round {now.round}, personalization: {now.how}")


def serve(home: Path, settings: Settings, *, stopped: Callable[[], bool], log: Callable[[str], None]) -> None:
    """Answers until ``stopped``; then requests under way are finished."""
    allocator.keep_freed()
    service = service_of(home, settings)
    follower = Follower(service, log)
    follower.look()
    server = start(settings, service, log)
    try:
        if service.answering is None:
            log("there is nothing to answer with yet: 'edge-agent run' brings it")
        while not stopped():
            time.sleep(LOOK_S)
            follower.look()
    finally:
        server.stop()


def main(arguments: list[str]) -> None:
    """``--home HOME HOST PORT``: as ``edge-agent serve`` leaves it."""
    _, home, host, port = arguments
    with processes.until_signal() as stopped:
        settings = settings_of(Path(home)).listening(host, int(port))
        serve(Path(home), settings, stopped=stopped, log=processes.say)


if __name__ == "__main__":
    processes.guarded(lambda: main(sys.argv[1:]))
