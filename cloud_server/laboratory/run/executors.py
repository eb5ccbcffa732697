"""Executors do the work of a run's devices: in this process, in several processes, or on a Ray cluster.

All give the same results in the same order: a task is a fixed group of devices, and a device's result depends only on
the run, the round and the device.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, Protocol

from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run.device_work import (
    DeviceEvaluation,
    EvaluationTask,
    Setting,
    TrainedDevice,
    TrainingTask,
    Worker,
    chunks,
)
from fleet_core.base.errors import ConfigError, RoundError

EVALUATED_AT_ONCE = 4


class Executor(Protocol):
    """Results come in the order of the task's clients."""

    def learn(self, task: TrainingTask) -> Iterator[TrainedDevice]: ...

    def evaluate(self, task: EvaluationTask) -> Iterator[DeviceEvaluation]: ...

    def close(self) -> None: ...


def training_tasks(task: TrainingTask, size: int) -> list[TrainingTask]:
    return [
        replace(task, clients=part, per_device={one: task.per_device[one] for one in part if one in task.per_device})
        for part in chunks(task.clients, size)
    ]


def evaluation_tasks(task: EvaluationTask) -> list[EvaluationTask]:
    return [
        EvaluationTask(task.round, part, task.served, task.kind, task.support)
        for part in chunks(task.clients, EVALUATED_AT_ONCE)
    ]


class Inline:
    """Does the work in this process."""

    def __init__(self, setting: Setting, workload: Workload):
        self._worker, self._size = Worker(setting, workload), setting.side_by_side

    def learn(self, task: TrainingTask) -> Iterator[TrainedDevice]:
        for part in training_tasks(task, self._size):
            yield from self._worker.learn(part)

    def evaluate(self, task: EvaluationTask) -> Iterator[DeviceEvaluation]:
        for part in evaluation_tasks(task):
            yield from self._worker.evaluate(part)

    def close(self) -> None:
        pass


class Processes:
    """Does the work in ``count`` processes of one thread each, which end with this process."""

    def __init__(self, setting: Setting, count: int):
        self._setting = setting
        self._pool = ProcessPoolExecutor(
            count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(setting,)
        )

    def learn(self, task: TrainingTask) -> Iterator[TrainedDevice]:
        yield from self._each(_learn, training_tasks(task, self._setting.side_by_side))

    def evaluate(self, task: EvaluationTask) -> Iterator[DeviceEvaluation]:
        yield from self._each(_evaluate, evaluation_tasks(task))

    def _each(self, work: Callable[[Any], list[Any]], parts: Sequence[Any]) -> Iterator[Any]:
        """Yields each result and drops it, so that a round's updates are never all in memory."""
        waiting = deque[Future[list[Any]]]()
        try:
            waiting.extend(self._pool.submit(work, part) for part in parts)
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool as error:
            self._pool.shutdown()  # a process still at work would write beside the resumed run
            raise _died("a process") from error
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class RayExecutor:
    """Does the work in ``count`` actors of a Ray cluster, by default one per CPU. All its machines must have the run's
    folder and the data under the same paths. RAY_ADDRESS names the cluster; without it, Ray uses a cluster on this
    machine or starts one."""

    def __init__(self, setting: Setting, count: int = 0):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise ConfigError("Ray is not installed", hint='pip install "metafleet[ray]"') from error
        self._ray, self._setting = ray, setting
        if not ray.is_initialized():
            ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        there = int(ray.cluster_resources().get("CPU", 1))
        self._actors = [ray.remote(num_cpus=1)(Worker).remote(setting) for _ in range(min(count or there, there))]

    def learn(self, task: TrainingTask) -> Iterator[TrainedDevice]:
        yield from self._each("learn", training_tasks(task, self._setting.side_by_side))

    def evaluate(self, task: EvaluationTask) -> Iterator[DeviceEvaluation]:
        yield from self._each("evaluate", evaluation_tasks(task))

    def _each(self, what: str, parts: Sequence[Any]) -> Iterator[Any]:
        """Gives each actor one task at a time, and the next when it is free."""
        free, todo = list(self._actors), deque(enumerate(parts))
        at_work, done = dict[Any, tuple[int, Any]](), dict[int, Any]()
        try:
            for told in range(len(parts)):
                while told not in done:
                    while free and todo:
                        number, part = todo.popleft()
                        actor = free.pop()
                        at_work[getattr(actor, what).remote(part)] = number, actor
                    (ready, *_), _ = self._ray.wait(list(at_work))
                    number, actor = at_work.pop(ready)
                    free.append(actor)
                    done[number] = self._result(ready)
                yield from done.pop(told)
        finally:
            if at_work:  # after an error: actors still at work would write while the run is resumed
                self._ray.wait(list(at_work), num_returns=len(at_work))

    def _result(self, ready: Any) -> Any:
        try:
            return self._ray.get(ready)
        except self._ray.exceptions.RayActorError as error:
            raise _died("an actor of the Ray cluster") from error

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def _died(who: str) -> RoundError:
    hint = "the same command continues this run; if memory ran out, use fewer --jobs"
    return RoundError(f"{who} died while it worked", hint=hint)


_WORKER: Worker | None = None


def _begin(setting: Setting) -> None:
    global _WORKER
    end_with_parent()
    _WORKER = Worker(setting)


def end_with_parent() -> None:
    """Makes this process ignore interrupts, which its parent handles, and end with its parent, because it would wait
    for work forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    with contextlib.suppress(OSError):
        multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _learn(task: TrainingTask) -> list[TrainedDevice]:
    assert _WORKER is not None
    return _WORKER.learn(task)


def _evaluate(task: EvaluationTask) -> list[DeviceEvaluation]:
    assert _WORKER is not None
    return _WORKER.evaluate(task)
