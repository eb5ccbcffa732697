"""HTML elements that the report and the comparison share: the page, cards and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def page(title: str, style: str, body: str) -> str:
    """A page that loads nothing. title: text. style: CSS. body: HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def heading(title: str, facts: str) -> str:
    """The page's title with a line of facts below. Both are text."""
    return f'<header><h1>{escape(title)}</h1><p class="soft">{escape(facts)}</p></header>'


def card(title: str, figure: str, under: str) -> str:
    """A headline figure. figure: HTML; the others are text."""
    return (
        f'<div class="card"><h3>{escape(title)}</h3><div class="figure">{figure}</div>'
        f'<p class="under">{escape(under)}</p></div>'
    )


def cards(elements: Iterable[str]) -> str:
    return f'<section class="cards" aria-label="Headline figures">{"".join(elements)}</section>'


def table(heads: Sequence[str], rows: Iterable[str], style: str = "") -> str:
    """heads: text. rows: HTML, each a <tr>. style: a CSS class."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    opening = f'<table class="{style}">' if style else "<table>"
    return f'<div class="table">{opening}<thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(name: str, cells: Iterable[str]) -> str:
    """A table row. name: HTML of its heading. cells: HTML, each a <td>."""
    return f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>'


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table of text cells. The first cell of each row is its heading."""
    return table(heads, (row(escape(name), (f"<td>{escape(cell)}</td>" for cell in cells)) for name, *cells in rows),
                 style)
