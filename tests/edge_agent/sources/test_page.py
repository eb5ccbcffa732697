"""docs/sources.md: its tables are read by the schema, its lines by the reader, and its figures are the code's."""

from __future__ import annotations

import dataclasses
import re

import pytest

from edge_agent.sources import folder, interface, run_sources, text_lines
from edge_agent.sources.interface import Lost
from edge_agent.sources.text_lines import TextLines
from fleet_core.base import config
from fleet_core.board import source_settings
from fleet_core.board.device_settings import Settings
from fleet_core.board.source_settings import BUTTONS, SOURCES, Source
from tests.support.homes import DEVICE
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
TUTORIALS = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


def blocks(kind: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", [block for text in (TEXT, *TUTORIALS) for block in blocks("toml", text)])
def test_a_table_of_the_page_is_one_that_the_agent_reads(block: str) -> None:
    settings = config.parse(Settings, DEVICE + block, "docs/sources.md")
    source_settings.check(settings.source, (), "docs/sources.md")
    assert settings.source or settings.button


def test_every_kind_has_a_row_a_section_and_a_table() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \| .* \| ", TEXT, re.MULTILINE)[: len(SOURCES)]) == sorted(SOURCES)
    assert sorted(re.findall(r"^### (\w+)$", TEXT, re.MULTILINE)) == sorted(SOURCES)
    assert set(re.findall(r'^kind = "(\w+)"', TEXT, re.MULTILINE)) == {*SOURCES, *BUTTONS}


def test_the_keys_that_all_kinds_have_are_explained() -> None:
    keys = {one.name for one in dataclasses.fields(Source)} - {"kind"}
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ", TEXT, re.MULTILINE)
    assert keys == {key for row in rows for key in re.findall(r"`(\w+)`", row)} - set(SOURCES)


@pytest.mark.parametrize("lines", [*blocks("csv"), *(line for block in blocks("json") for line in block.splitlines())])
def test_a_line_of_the_page_is_a_reading(lines: str) -> None:
    items = TextLines().message(lines.encode())
    assert items
    assert not any(isinstance(one, Lost) for one in items)


def test_the_figures_of_the_page_are_the_codes() -> None:
    assert f"over {text_lines.MAX_LINE_BYTES:,} bytes" in TEXT
    assert f"at most {folder.MAX_FILES:,}." in TEXT
    assert (interface.MAX_BYTES_PER_S, run_sources.MAX_SAMPLES_PER_S, run_sources.LAST_S) == (2 << 20, 20, 300.0)
    assert (Source.every_s, folder.SETTLED_S) == (0.5, 1.0)
