"""The benchmark of the engines: small versions, and pages that hold the tables of its files."""

from __future__ import annotations

import pytest

from benchmarks.engines import parity, tables
from benchmarks.markdown import filled
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec


def test_the_pages_hold_the_tables_of_the_files() -> None:
    found = tables.made()
    for page, names in tables.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert filled(text, {name: found[name] for name in names}) == text, "python -m benchmarks.engines.tables"


@pytest.mark.slow
def test_both_engines_are_compared_with_double_precision(one_torch_thread: None) -> None:
    layout = models.describe("mlp", InputSpec((6,)), ("a", "b", "c"), {"hidden": [5]})
    found = parity.compared(layout, "fedavg", seeds=2)
    assert max(found["onnx-torch"]) < 1e-4
    assert all(0 < distance < 1e-3 for distance in found["onnx-double"])
    assert set(found["step_s"]) == {"torch", "onnx"}
    assert "cannot become a graph" in parity.compared(layout, "pfedgp")["why"]
