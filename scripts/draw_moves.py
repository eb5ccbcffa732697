"""Draws docs/moves.svg, what is sent in a round by each family of methods: `.venv/bin/python scripts/draw_moves.py`.

What is drawn comes from the registry of methods; tests/project/test_site.py compares the picture with what this draws.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cloud_server.choices.method_catalogue import stays, transfer_text  # noqa: E402
from fleet_core.algorithms.methods.registry import METHODS  # noqa: E402

PICTURE = ROOT / "docs" / "moves.svg"
SHOWN = ("fedavg", "scaffold", "per-fedavg-fo", "pfldyn-proto", "fedrep", "lg-fedavg", "fedproto", "pfedhn", "knn-per")
WIDTH, ROW, TOP = 900, 96, 56
STYLE = (
    "text{font:14px system-ui,'DejaVu Sans',sans-serif;fill:#1b1f24}.soft{fill:#5c6570;font-size:12.5px}"
    ".name{font-weight:600}.box{fill:#fff;stroke:#c3c9ce}.page{fill:#f7f7f4}.down{stroke:#0b6b8f}.up{stroke:#a84e09}"
    ".line{stroke-width:2;fill:none}.stay{fill:#e3eff4}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e8ea}.soft{fill:#9ba5af}.box{fill:#1b1f23;stroke:#30363c}"
    ".page{fill:#131619}.down{stroke:#62bfe2}.up{stroke:#f0a35e}.stay{fill:#1a2e37}}"
)


def arrow(y: float, to_right: bool, words: str) -> str:
    """An arrow between aggregator and device, with what moves above it."""
    kind, begin, end, tip = ("down", 300, 560, -8) if to_right else ("up", 560, 300, 8)
    return (f'<path class="line {kind}" d="M{begin} {y}H{end}m{tip} -5l{-tip} 5l{tip} 5"/>'
            f'<text x="430" y="{y - 6}" text-anchor="middle">{escape(words)}</text>')


def row(name: str, top: float) -> str:
    method = METHODS[name]
    kept = ", ".join(stays(method)) or "samples alone"
    down, up = transfer_text(method, "down"), transfer_text(method, "up")
    return "".join((
        f'<text class="name" x="20" y="{top + 40}">{name}</text>',
        f'<rect class="box" x="170" y="{top + 10}" width="120" height="66" rx="8"/>',
        f'<text x="230" y="{top + 48}" text-anchor="middle">aggregator</text>',
        f'<rect class="box stay" x="570" y="{top + 10}" width="310" height="66" rx="8"/>',
        f'<text x="586" y="{top + 36}">device keeps</text>',
        f'<text class="soft" x="586" y="{top + 58}">{escape(kept)}</text>',
        arrow(top + 34, True, down), arrow(top + 66, False, up),
    ))


def picture() -> str:
    height = TOP + ROW * len(SHOWN) + 12
    said = "What each family of methods sends down, sends up, and keeps on the device in a round"
    rows = "".join(row(name, TOP + ROW * k) for k, name in enumerate(SHOWN))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{said}">'
            f'<title>{said}</title><style>{STYLE}</style><rect class="page" width="100%" height="100%" rx="10"/>'
            f'<text x="20" y="34">In a round: <tspan class="soft">blue goes down to a device, orange up to the '
            f"aggregator; samples never move</tspan></text>{rows}</svg>\n")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
