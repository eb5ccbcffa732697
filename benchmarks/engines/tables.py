"""The tables of README.md and of docs/engines.md, from the files beside this one.

    python -m benchmarks.engines.tables
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.floor import MODULES, OPENED, TRIMMED
from benchmarks.markdown import filled, table
from fleet_core.base import storage
from fleet_core.model.train_graph import NEEDS

HERE = Path(__file__).parent
PAGES = {HERE / "README.md": ("methods", "models", "numbers", "memory", "floor", "rounding"),
         HERE.parents[1] / "docs" / "engines.md": ("floor", "methods", "numbers")}


def read(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))


def methods(found: Mapping[str, Any]) -> str:
    head = ("method", "engines", "graphs", "onnx to torch", "onnx to double", "torch to double")
    return table(head, (_method(name, row) for name, row in found["methods"].items()))


def _method(name: str, row: Mapping[str, Any]) -> Sequence[str]:
    if "why" in row:
        return f"`{name}`", "torch", row["why"], "", "", ""
    second = any(row["loss"] == NEEDS[a][0] and NEEDS[a][1] for a in (_adaptation(name),))
    graphs = f"`{row['loss']}`" + (", `product`" if second else "")
    return f"`{name}`", "torch, onnx", graphs, *_distances(row)


def _adaptation(name: str) -> str:
    from fleet_core.algorithms.methods.registry import METHODS

    return METHODS[name].adaptation


def _distances(row: Mapping[str, Any]) -> list[str]:
    """Median over seeds and the largest."""
    pairs = ("onnx-torch", "onnx-double", "torch-double")
    return [f"{statistics.median(row[pair]):.0e}, at most {max(row[pair]):.0e}" for pair in pairs]


def models(found: Mapping[str, Any]) -> str:
    head = ("model", "parameters", "limit", "method", "onnx to torch", "onnx to double", "torch to double",
            "onnx passed", "torch passed", "step, of torch's", "graph, kB", "made in, s")
    rows = []
    for name, case in found["models"].items():
        for method, row in case["estimators"].items():
            first = name, f"{case['parameters']:,}", f"{case['limit']:.0e}", f"`{method}`"
            if "why" in row:
                rows.append((*first, row["why"], *[""] * 7))
                continue
            times = row["step_s"]
            rows.append((*first, *_distances(row), _passed(row, case["limit"], "onnx", "torch"),
                         _passed(row, case["limit"], "torch", "onnx"), f"{times['onnx'] / times['torch']:.2f}",
                         f"{row['bytes'] / 1e3:.0f}", f"{row['export_s']:.0f}"))
    return table(head, rows)


def numbers(found: Mapping[str, Any]) -> str:
    head = ("model, loss", "method", "graphs", "onnx to torch", "onnx to double", "torch to double")
    return table(head, ((case, *(_method(name, row)[i] for i in (0, 2, 3, 4, 5)))
                        for case, methods in found["numbers"].items() for name, row in methods.items()))


def _passed(row: Mapping[str, Any], limit: float, engine: str, other: str) -> str:
    """On how many seeds both are within the limit, or this engine is no farther from double precision than the other.
    """
    seeds = list(zip(row["onnx-torch"], row[f"{engine}-double"], row[f"{other}-double"], strict=True))
    return f"{sum(near <= limit or own <= theirs for near, own, theirs in seeds)} of {len(seeds)}"


def memory(found: Mapping[str, Any]) -> str:
    head = ("model, method", "where", "before", "while it trains", "graph kept open", "afterwards")
    return table(head, (
        (case, where, *(f"{row[key]:.0f}" for key in ("before", "training", "kept open", "afterwards")))
        for case, places in found.items() for where, row in places.items()
    ))


def floor(found: Mapping[str, float]) -> str:
    rows, before = [], 0.0
    for name in (*MODULES, OPENED, TRIMMED):
        rows.append((name, f"{found[name] - before:.1f}", f"{found[name]:.1f}"))
        before = found[name]
    return table(("loaded", "adds, MB", "in all, MB"), rows)


def rounding(found: Mapping[str, Any]) -> str:
    head = ("engine", "first weights", "accuracy", "macro-F1", "loss of the last round")
    return table(head, (
        (engine, "the fleet's" if number == 0 else f"last digits moved, {number}", f"{row['accuracy']:.3f}",
         f"{row['macro_f1']:.3f}", f"{row['loss']:.3f}")
        for engine, rows in found.items() for number, row in enumerate(rows)
    ))


def made() -> dict[str, str]:
    """The tables of the files, by name."""
    parity = read("parity")
    return {"methods": methods(parity), "models": models(parity), "numbers": numbers(parity),
            "memory": memory(read("memory")), "floor": floor(read("floor")), "rounding": rounding(read("rounding"))}


def main() -> None:
    tables = made()
    for page, names in PAGES.items():
        text = filled(page.read_text(encoding="utf-8"), {name: tables[name] for name in names})
        storage.write_atomic(page, text.encode())


if __name__ == "__main__":
    main()
