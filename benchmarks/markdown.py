"""Markdown tables, and pages with tables between markers: ``<!-- table NAME -->`` … ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

Rows = Iterable[Sequence[str]]

PLACE = re.compile(r"<!-- table (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


def table(head: Sequence[str], rows: Rows) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]) + "\n"


def filled(text: str, tables: Mapping[str, str]) -> str:
    """The page with each table in its place. Raises ValueError for a place without a table, and a table without one."""
    places = {found["name"] for found in PLACE.finditer(text)}
    if wrong := places ^ set(tables):
        raise ValueError(f"tables and their places differ: {', '.join(sorted(wrong))}")
    return PLACE.sub(lambda found: f"<!-- table {found['name']} -->\n\n{tables[found['name']]}\n<!-- end -->", text)
