"""The documentation as a site: it builds without a warning, needs nothing from elsewhere, and agrees with the code."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from benchmarks.console.browser import chromium, complaints, emulate
from cloud_server.commands import cli
from cloud_server.records.fleet_settings import NOTES
from edge_agent.commands.cli import parser
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:'myst_parser")
AXE = ROOT / "tests" / "support" / "axe" / "axe.min.js"
KINDS = ("Tutorials", "How to", "Reference", "Explanation", "Honest limits")
LOOKED_AT = ("index.html", "docs/papers.html", "docs/console.html", "reference/commands.html")
FETCHED = re.compile(r"""<(?:script|link|img|source|iframe)\b[^>]*\b(?:src|href)=["']((?:https?:)?//[^"']+)""")


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    assert script("make_docs").build(folder / "pages", folder / "site") == 0
    return folder / "site"


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.glob("**/*.html"))
    assert len(pages) > 50
    assert {found for page in pages for found in FETCHED.findall(page.read_text(encoding="utf-8"))} == set()
    styles = [path.read_text(encoding="utf-8") for path in site.glob("**/*.css")]
    assert [found for text in styles for found in re.findall(r"(?:url\(|@import)\s*['\"]?https?:[^)]*", text)] == []


@pytest.mark.slow
def test_the_first_page_leads_to_every_kind_of_page_and_has_both_pictures(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    captions = re.findall(r'<p class="caption" role="heading"><span class="caption-text">([^<]+)</span>', text)
    assert captions == list(KINDS)
    for name in ("demo.svg", "console.png"):
        assert (site / "_images" / name).exists()
        assert f"_images/{name}" in text


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["[x](there-is-none.md)", "[x](other.md#no-such-heading)", "![x](none.png)"])
def test_a_wrong_link_anchor_or_picture_fails_the_build(wrong: str, tmp_path: Path) -> None:
    make_docs = script("make_docs")
    pages = tmp_path / "pages"
    shutil.copytree(ROOT / "docs" / "site", pages / "site")
    (pages / "other.md").write_text("---\norphan: true\n---\n# Other\n")
    for text, code in ((wrong, 1), ("[x](other.md#other)", 0)):
        (pages / "index.md").write_text(f"# Start\n\n{text}\n")
        assert make_docs.sphinx(pages, tmp_path / "site") == code


@pytest.mark.slow
@pytest.mark.needs("chromium", "chromedriver")
def test_its_pages_are_whole_in_a_browser_from_a_folder_without_a_network(site: Path) -> None:
    with chromium() as driver:
        for page in LOOKED_AT:
            for width, dark in ((1280, False), (1280, True), (360, False), (360, True)):
                emulate(driver, width, 900, dark=dark)
                driver.get((site / page).as_uri())
                assert driver.execute_script("return document.documentElement.scrollWidth") <= width, (page, width)
                driver.execute_script(AXE.read_text(encoding="utf-8"))
                found = driver.execute_async_script("axe.run('article', {preload: false}).then(arguments[0])")
                assert [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found["violations"]
                        if one["impact"] in ("serious", "critical")] == [], (page, width, dark)
            names = driver.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
            assert [name for name in names if not name.startswith("file:")] == []
            assert complaints(driver) == []
        driver.get((site / "search.html").as_uri() + "?q=quarantine")
        for _ in range(200):
            if hits := driver.execute_script("return document.querySelectorAll('#search-results li').length"):
                break
        assert hits > 0


def paths(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        path = f"{before} {name}".strip()
        if getattr(command, "commands", None):
            yield from paths(command, path)
        elif not getattr(command, "hidden", False):
            yield path


def test_the_reference_has_every_command_and_every_key() -> None:
    pages = script("docs_reference").pages()
    for name, root in (("commands", typer.main.get_command(cli.app)), ("edge-agent", parser())):
        assert sorted(re.findall(r"^## (.+)$", pages[f"reference/{name}.md"], re.MULTILINE)) == sorted(paths(root))
    toml = pages["reference/toml.md"]
    assert [key for key in NOTES if f"| `{key.partition('.')[2]}` |" not in toml] == []
    assert "## Manifest\n" in pages["reference/messages.md"]
    assert "POST /actions/ACTION" in pages["reference/http.md"]
    assert "## simulate\n" in pages["reference/python.md"]


def test_the_picture_of_what_moves_is_what_the_script_draws() -> None:
    draw = script("draw_moves")
    assert draw.PICTURE.read_text(encoding="utf-8") == draw.picture()


@pytest.mark.slow
def test_the_recording_of_the_demo_is_drawn_from_what_was_recorded() -> None:
    record = script("record_demo")
    said, events = record.recorded()
    assert "metafleet demo" in said
    assert events == sorted(events, key=lambda event: event[0])
    assert record.PICTURE.read_text(encoding="utf-8") == record.draw(events, said)
    last = "".join(text for line in list(record.frames(events))[-1][1] for text, _, _ in line)
    assert "PFLDyn-Proto" in last
    assert "report.html" in last


def test_the_page_of_the_first_minutes_has_the_downloads_that_were_counted() -> None:
    page = (ROOT / "docs" / "first-ten-minutes.md").read_text(encoding="utf-8")
    result = json.loads((ROOT / "benchmarks/first_minutes/result.json").read_text(encoding="utf-8"))
    counted, minutes = result["downloads"], result["minutes"]
    seconds = re.findall(r"^\| [^|]+ \| (\d+\.\d) \|$", page, re.MULTILINE)
    assert sorted(map(float, seconds)) == sorted(minutes["seconds"].values())
    assert f"{minutes['installed_bytes'] / 1e9:.2f} GB" in page
    rows = re.findall(r"^\| (an? [\w, ]+) \| .* \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {who: (int(count), int(size)) for who, count, size in rows} == {
        who: (found["files"], round(found["bytes"] / 1e6)) for who, found in counted.items()}
