"""A client that repeats one request over one connection and records the answers; and the server.

    python benchmarks/on_device/asking.py HOST PORT PATH BODY SECONDS        prints JSON

Uses only the standard library, in a separate process: clients that share an interpreter would wait for each other. BODY
is a file with a request as JSON.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def fingerprint(model: str, outputs: dict[str, list[Any]]) -> str:
    """A hash of an answer: the model it names, and its outputs."""
    text = json.dumps([model, outputs["probabilities"], outputs["label"]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def ask(host: str, port: int, path: str, body: bytes, seconds: float) -> dict[str, Any]:
    """Sends at least one request. answers: how often each came, by fingerprint. failed: everything else. milliseconds:
    of every answered request."""
    connection = http.client.HTTPConnection(host, port, timeout=30)
    answers, failed, milliseconds = Counter[str](), list[str](), list[float]()
    until = time.monotonic() + seconds
    while not (milliseconds or failed) or time.monotonic() < until:
        begun = time.perf_counter()
        try:
            connection.request("POST", path, body)
            response = connection.getresponse()
            said = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            failed.append(f"{type(error).__name__}: {error}")
            connection.close()
            continue
        milliseconds.append(1000 * (time.perf_counter() - begun))
        if response.status == 200:
            outputs = {output["name"]: output["data"] for output in said["outputs"]}
            answers[fingerprint(said["parameters"]["model"], outputs)] += 1
        else:
            failed.append(f"{response.status}: {said}")
    return {"answers": answers, "failed": failed, "milliseconds": milliseconds}


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """(process, host, port) of a command that prints ``answers at http://HOST:PORT/``; it is ended with SIGTERM."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "http://" in line:
                host, _, port = line.partition("http://")[2].partition("/")[0].rpartition(":")
                yield process, host, int(port)
                break
        else:
            raise RuntimeError(f"{' '.join(command)} did not start")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def clients(count: int, host: str, port: int, path: str, body: Path, seconds: float) -> list[subprocess.Popen[str]]:
    """``count`` client processes."""
    command = [sys.executable, "-I", __file__, host, str(port), path, str(body), str(seconds)]
    return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]


def collected(asking: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The output of the clients, after they end."""
    return [json.loads(process.communicate()[0]) for process in asking]


if __name__ == "__main__":
    print(json.dumps(ask(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]).read_bytes(),
                         float(sys.argv[5]))))
