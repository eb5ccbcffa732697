"""Writes the files of a comparison: compare.html, curves.png, tables.csv and compare.json."""

from __future__ import annotations

import json
from pathlib import Path

from cloud_server.laboratory.compare import comparison as comparing
from cloud_server.laboratory.compare import comparison_charts, html_page, tables
from cloud_server.laboratory.compare.comparison import Comparison
from fleet_core.base import storage


def write(compared: Comparison, out: Path) -> list[Path]:
    """The paths of the files, in ``out``. Raises ConfigError before anything is written if matplotlib is missing."""
    contents = {
        "compare.html": html_page.render(compared, title="Comparison").encode(),
        "curves.png": comparison_charts.png(compared, html_page.brief(compared)),
        "tables.csv": tables.csv_text(compared).encode(),
        "compare.json": json.dumps(comparing.to_json(compared), indent=2, allow_nan=False).encode(),
    }
    for name, content in contents.items():
        storage.write_atomic(out / name, content)
    return [out / name for name in contents]
