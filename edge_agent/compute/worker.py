"""Workers of the agent: child processes, where jobs go in and results come out over pipes, and a thread.

A frame is 4 bytes of length, a JSON header, 8 bytes of length, and safetensors. Nothing is pickled. A child starts with
the first job and runs until ``stop``.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

from fleet_core.base import processes, storage
from fleet_core.base.errors import FleetError, MessageError, RoundError

STOP_S = 2.0
MAX_HEADER_BYTES = 1 << 22
MAX_ARRAYS_BYTES = 1 << 33


@dataclass(frozen=True)
class Job:
    """kind: ``train`` or ``adapt``. header: plain values; arrays are passed in the device's folder."""

    kind: str
    header: Mapping[str, Any]


@dataclass(frozen=True)
class Done:
    """The result of a job. error: why it failed, or empty."""

    kind: str
    header: Mapping[str, Any]
    arrays: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class Trainer(Protocol):
    """Takes one job at a time: in a child process on a device, in the same process in tests."""

    @property
    def busy(self) -> bool: ...

    def submit(self, job: Job) -> None: ...

    def poll(self) -> Done | None: ...

    def descriptors(self) -> tuple[int, ...]: ...

    def stop(self) -> None: ...


def write_frame(stream: BinaryIO, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    head, body = json.dumps(header).encode(), storage.pack(arrays)
    stream.write(struct.pack("<I", len(head)) + head + struct.pack("<Q", len(body)) + body)
    stream.flush()


def write_result(stream: BinaryIO, done: Done) -> None:
    """Writes a result for the agent. If the agent is gone, ``stream`` is redirected to the null device: since Python
    3.13 the flush at the process's end would report the broken pipe."""
    try:
        write_frame(stream, {**done.header, "error": done.error}, done.arrays)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse_frame(buffer: bytearray) -> tuple[dict[str, Any], dict[str, Any], int] | None:
    """(header, arrays, bytes used) of the frame at the buffer's start, or None while it is incomplete. Raises
    MessageError for a frame that is too large."""
    if len(buffer) < 4:
        return None
    (head_size,) = struct.unpack_from("<I", buffer)
    if head_size > MAX_HEADER_BYTES:
        raise MessageError(f"a frame header of {head_size} bytes", expected=f"at most {MAX_HEADER_BYTES}")
    if len(buffer) < 12 + head_size:
        return None
    (body_size,) = struct.unpack_from("<Q", buffer, 4 + head_size)
    if body_size > MAX_ARRAYS_BYTES:
        raise MessageError(f"a frame of {body_size} bytes", expected=f"at most {MAX_ARRAYS_BYTES}")
    end = 12 + head_size + body_size
    if len(buffer) < end:
        return None
    header = json.loads(bytes(buffer[4 : 4 + head_size]))
    arrays, _ = storage.unpack(bytes(buffer[12 + head_size : end]), where="trainer frame")
    return header, arrays, end


class Child:
    """A child process ``python -m`` with ``arguments``. name: in error messages. The child ends with the agent, because
    its standard input closes."""

    def __init__(self, name: str, arguments: Sequence[str], environ: Mapping[str, str]):
        self._name, self._arguments, self._environ = name, list(arguments), dict(environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._job: Job | None = None
        self._failure = ""

    @property
    def busy(self) -> bool:
        return self._job is not None

    def submit(self, job: Job) -> None:
        """Raises RoundError while a job is running. If the child does not start or take the job, ``poll`` gives the
        error."""
        if self._job is not None:
            raise RoundError(f"the {self._name} is busy")
        self._job = job
        try:
            write_frame(_stream(self._start().stdin), {"kind": job.kind, **job.header}, {})
        except OSError as error:
            self._end_child()
            self._failure = f"the {self._name} process did not take the job: {error.strerror or error}"

    def poll(self) -> Done | None:
        """The finished job's result, or None. If the child died or its answer is malformed, a result with an error."""
        if self._job is None:
            return None
        if self._child is None:
            return self._done({}, error=self._failure)
        still_open = self._drain(_stream(self._child.stdout).fileno())
        try:
            frame = parse_frame(self._buffer)
        except (FleetError, ValueError) as error:
            self._end_child()
            return self._done({}, error=f"the {self._name} process sent a malformed answer: {error}")
        if frame is not None:
            header, arrays, used = frame
            del self._buffer[:used]
            return self._done(header, arrays, str(header.get("error", "")))
        if still_open:
            return None
        code = self._end_child()
        return self._done({}, error=f"the {self._name} process ended with exit code {code}")

    def _done(self, header: Mapping[str, Any], arrays: Mapping[str, Any] | None = None, error: str = "") -> Done:
        kind = "" if self._job is None else self._job.kind
        self._job = None
        return Done(kind, header, arrays or {}, error)

    def descriptors(self) -> tuple[int, ...]:
        return () if self._child is None else (_stream(self._child.stdout).fileno(),)

    def stop(self) -> None:
        self._end_child()
        self._job = None

    def _end_child(self) -> int:
        """Closes the child's input, which ends it; kills it after two seconds. Returns its exit code."""
        child, self._child = self._child, None
        self._buffer.clear()
        if child is None:
            return 0
        with contextlib.suppress(OSError):
            _stream(child.stdin).close()
        try:
            child.wait(timeout=2)
        except subprocess.TimeoutExpired:
            child.kill()
        _stream(child.stdout).close()
        return child.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._end_child()
        if self._child is None:
            self._child = subprocess.Popen(
                processes.command(*self._arguments),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **self._environ},
                start_new_session=True,  # Ctrl-C goes to the agent, which ends its children in order
            )
            os.set_blocking(_stream(self._child.stdout).fileno(), False)
        return self._child

    def _drain(self, descriptor: int) -> bool:
        """Reads what is available; False at the end of the stream."""
        while True:
            try:
                data = os.read(descriptor, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._buffer += data


class TrainerProcess(Child):
    """The trainer of the engine torch."""

    def __init__(self, threads: int = 1):
        environ = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        super().__init__("trainer", ["edge_agent.compute.trainer", "--threads", str(threads)], environ)


class Jobs(Protocol):
    """Does jobs one after the other, in one thread."""

    def handle(self, job: Job) -> Done: ...

    def cancel(self) -> None:
        """Called by another thread: the present job ends as soon as it can, with an error."""


class Threaded:
    """A worker in a thread of this process. make: what does the jobs; its memory is freed by ``stop``.

    The engine onnx needs no child process: a child would hold Python, numpy and onnxruntime once more, and the thread's
    memory is freed too (``benchmarks/engines``).
    """

    def __init__(self, make: Callable[[], Jobs]) -> None:
        self._make = make
        self._jobs: Jobs | None = None
        self._thread: threading.Thread | None = None
        self._done: list[Done] = []
        self._read, self._write = os.pipe()

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def submit(self, job: Job) -> None:
        """Raises RoundError while a job is running."""
        if self._thread is not None:
            raise RoundError("the trainer is busy")
        jobs = self._jobs = self._jobs or self._make()
        self._thread = threading.Thread(target=self._run, args=(jobs, job), name="trainer", daemon=True)
        self._thread.start()

    def _run(self, jobs: Jobs, job: Job) -> None:
        try:
            done = jobs.handle(job)
        except BaseException as error:  # the agent must learn what ended the thread
            done = Done(job.kind, {}, error=f"{type(error).__name__}: {error}")
        self._done.append(done)
        os.write(self._write, b".")

    def poll(self) -> Done | None:
        if self._thread is None or not self._done:
            return None
        self._thread.join()
        self._thread = None
        os.read(self._read, 1)
        return self._done.pop()

    def descriptors(self) -> tuple[int, ...]:
        return (self._read,) if self.busy else ()

    def stop(self) -> None:
        """Ends the present job, whose result is dropped. A call into onnxruntime cannot be broken off: it ends with the
        process at the latest."""
        jobs, self._jobs = self._jobs, None
        if jobs is not None and self._thread is not None:
            jobs.cancel()
            self._thread.join(timeout=STOP_S)
        self.poll()


class ByEngine:
    """The trainers of several engines as one: a job's header says which."""

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        self._trainers = trainers

    @property
    def busy(self) -> bool:
        return any(trainer.busy for trainer in self._trainers.values())

    def submit(self, job: Job) -> None:
        self._trainers[job.header["engine"]].submit(job)

    def poll(self) -> Done | None:
        return next((done for trainer in self._trainers.values() if (done := trainer.poll()) is not None), None)

    def descriptors(self) -> tuple[int, ...]:
        return tuple(d for trainer in self._trainers.values() for d in trainer.descriptors())

    def stop(self) -> None:
        for trainer in self._trainers.values():
            trainer.stop()


class Inline:
    """A worker in the caller's process, for a whole fleet in one process. handle: does a job."""

    def __init__(self, handle: Callable[[Job], Done]) -> None:
        self._handle = handle
        self._finished: Done | None = None

    @property
    def busy(self) -> bool:
        return self._finished is not None

    def submit(self, job: Job) -> None:
        self._finished = self._handle(job)

    def poll(self) -> Done | None:
        finished, self._finished = self._finished, None
        return finished

    def descriptors(self) -> tuple[int, ...]:
        return ()

    def stop(self) -> None:
        self._finished = None


def _stream(stream: Any) -> Any:
    if stream is None:
        raise RoundError("the process has no pipe")
    return stream
