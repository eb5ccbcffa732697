"""The tables of README.md, from ``result.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import markdown
from cloud_server.figures.formatting import ABSENT, bytes_text
from fleet_core.base.storage import write_atomic

Stage = Mapping[str, Any]
TITLES = {"pfldyn-proto": "class means", "fedavg-meta": "fine-tuned", "per-fedavg-fo": "Per-FedAvg"}
NEAREST = "nearest mean"


def write(page: Path, found: Mapping[str, Any]) -> None:
    made = {f"{part}-{stage}": make(found[part][stage]) for part in found
            for stage, make in (("validation", validation), ("test", test)) if stage in found[part]}
    write_atomic(page, markdown.filled(page.read_text(encoding="utf-8"), made).encode())


def validation(stage: Stage) -> str:
    """Candidates down, sets across; the last rows need no fleet."""
    names = list(stage)
    labels = dict.fromkeys(label for one in stage.values() for label in one["runs"])
    rows = [[label, *(_score(stage[name], label) for name in names), _mean(stage, label), *_size(stage, label)]
            for label in labels]
    plain = [stage[name][NEAREST] for name in names]
    rows.append([NEAREST, *(f"{value:.3f}" for value in plain), f"{np.mean(plain):.3f}", ABSENT, ABSENT])
    return markdown.table(["candidate", *names, "mean", "parameters", "bytes"], rows)


def test(stage: Stage) -> str:
    """Sets down; for each method every model."""
    labels = list(dict.fromkeys(label for one in stage.values() for label in one["runs"]))
    methods = list(dict.fromkeys(m for one in stage.values() for runs in one["runs"].values() for m in runs))
    columns = [(label, method) for method in methods for label in labels]
    head = ["set", *(f"{label}, {TITLES[method]}" for label, method in columns), NEAREST]
    return markdown.table(head, _test_rows(stage, columns))


def _test_rows(stage: Stage, columns: list[tuple[str, str]]) -> Iterator[list[str]]:
    for name, one in stage.items():
        yield [name, *(_text(_values(one, *column)) for column in columns), f"{one[NEAREST]:.3f}"]
    whole = [[value for one in stage.values() for value in _means(one, *column)] for column in columns]
    plain = [one[NEAREST] for one in stage.values()]
    yield ["mean", *(f"{np.mean(values):.3f}" if len(values) == len(stage) else ABSENT for values in whole),
           f"{np.mean(plain):.3f}"]


def _values(one: Mapping[str, Any], label: str, method: str) -> list[float]:
    return [figures["score"] for figures in one["runs"].get(label, {}).get(method, {}).values()]


def _means(one: Mapping[str, Any], label: str, method: str) -> list[float]:
    values = _values(one, label, method)
    return [float(np.mean(values))] if values else []


def _score(one: Mapping[str, Any], label: str) -> str:
    (method,) = one["runs"].get(label, {"": {}})
    return _text(_values(one, label, method))


def _text(values: list[float]) -> str:
    return f"{np.mean(values):.3f}" if values else ABSENT


def _mean(stage: Stage, label: str) -> str:
    each = [value for one in stage.values() for method in one["runs"].get(label, ())
            for value in _means(one, label, method)]
    return f"{np.mean(each):.3f}" if len(each) == len(stage) else ABSENT


def _size(stage: Stage, label: str) -> tuple[str, str]:
    """Parameters, least to most over the sets, and bytes of all runs of one seed together."""
    runs = [next(iter(seeds.values())) for one in stage.values() for seeds in one["runs"].get(label, {}).values()]
    sizes = sorted(run["parameters"] for run in runs)
    return f"{sizes[0]:,} to {sizes[-1]:,}", bytes_text(sum(run["payload_bytes"] for run in runs))
