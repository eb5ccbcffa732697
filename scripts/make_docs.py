"""Builds the documentation as a site, without a network: `make docs`, then build/site/index.html.

The pages are laid out in build/pages as in the repository, so that their links hold: docs/, the pages and pictures of
benchmarks/, docs/site/front.md as the first page, and what ``docs_reference`` reads from the code. Sphinx reports a
link, an anchor or a code block that is wrong, and the build fails.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def lay_out(to: Path) -> None:
    """Writes everything that the site is made of to the folder ``to``, which is emptied."""
    docs_reference = importlib.import_module("docs_reference")
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(ROOT / "docs", to / "docs", ignore=shutil.ignore_patterns("site", "README.md"))
    shutil.copytree(ROOT / "docs" / "site", to / "site")
    shutil.copy(ROOT / "docs" / "README.md", to / "docs" / "pages.md")
    for path in (*ROOT.glob("benchmarks/**/*.md"), *ROOT.glob("benchmarks/**/*.png"), ROOT / "CHANGELOG.md",
                 ROOT / "CONTRIBUTING.md"):
        _copied(path, to)
    (to / "docs" / "tour.md").write_text(notebook(ROOT / "docs" / "tour.ipynb"), encoding="utf-8")
    (to / "index.md").write_text((to / "site" / "front.md").read_text(encoding="utf-8"), encoding="utf-8")
    (to / "site" / "front.md").unlink()
    for name, text in docs_reference.pages().items():
        (to / name).parent.mkdir(exist_ok=True)
        (to / name).write_text(text, encoding="utf-8")
    inner = sorted(page.relative_to(to / "benchmarks").as_posix().removesuffix(".md")
                   for page in to.glob("benchmarks/*/**/*.md"))
    with open(to / "benchmarks" / "README.md", "a", encoding="utf-8") as index:
        index.write("\n```{toctree}\n:hidden:\n\n" + "\n".join(inner) + "\n```\n")
    for page in list(to.glob("**/*.md")):
        _settle(page, to)


def _settle(page: Path, to: Path) -> None:
    """Links to README.md lead to the first page, those to docs/README.md to its copy; files of the code that are linked
    are copied too."""
    text, here = page.read_text(encoding="utf-8"), page.parent.relative_to(to)

    def settled(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        path = (ROOT / here / target).resolve()
        if path == ROOT / "README.md":
            return f"]({'../' * len(here.parts)}index.md)"
        if path == ROOT / "docs" / "README.md":
            return f"]({'../' * len(here.parts)}docs/pages.md)"
        if path.is_file() and path.suffix != ".md":
            _copied(path, to)
        return f"]({target}{anchor})"

    page.write_text(LINK.sub(settled, text), encoding="utf-8")


def _copied(path: Path, to: Path) -> None:
    place = to / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, place)


def notebook(path: Path) -> str:
    """A notebook's texts and code as a page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    shown = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in parts]
    return "\n\n".join((*shown, f"The same as a [notebook]({path.name}).\n"))


def build(pages: Path, site: Path) -> int:
    """Lays the pages out and returns the exit code of Sphinx."""
    lay_out(pages)
    return sphinx(pages, site)


def sphinx(pages: Path, site: Path) -> int:
    """Sphinx's exit code: 0, or 1 after any warning."""
    from sphinx.cmd.build import build_main

    return build_main(["-b", "html", "-W", "--keep-going", "-q", "-d", str(pages.parent / "doctrees"), "-c",
                       str(pages / "site"), str(pages), str(site)])


if __name__ == "__main__":
    code = build(PAGES, SITE)
    if code == 0:
        print(SITE.relative_to(ROOT) / "index.html")
    raise SystemExit(code)
