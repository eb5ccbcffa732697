"""result.json and the tables of README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import markdown
from benchmarks.hostile.grid import ATTACKS, BACKDOOR, BOUND, DATA, INNER, MEAN, NOBODY, SETTINGS, SHARES, SIGN, Cell
from fleet_core.base import storage

Row = Mapping[str, Any]
NEAR = 0.03
ABSENT = "-"
RUINED = "ruined"
SUMMARIZED = ("fedavg-meta", "pfldyn-proto")


def rows(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.exists() else []


def key_of(row: Row) -> str:
    return Cell(*(row[name] for name in ("data", "method", "setting", "attack", "share", "seed"))).key


def write(found: Sequence[Row], path: Path) -> None:
    storage.write_json(path, {"settings": DATA, "rows": list(found)})


def fill(found: Sequence[Row], lived: Sequence[Row], page: Path) -> None:
    """Writes the tables into the page. found, lived: rows of result.json and of live.json."""
    places = {f"{data}-{share:.0%}".replace("%", ""): table(found, data, share) for data in DATA for share in SHARES}
    places |= {f"{data}-clean": clean(found, data) for data in DATA}
    places |= {f"{data}-refused": refusals(found, data) for data in DATA}
    places |= {"live": live(lived), "within": within(found)}
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), places), encoding="utf-8")


def live(found: Sequence[Row]) -> str:
    """Cell by cell: the mean accuracy of honest devices, in percent, in the fleet and in the simulation."""
    def of(fleet: Row) -> tuple[str, ...]:
        if "stopped" in fleet:
            return f"stopped after {fleet['stopped']} rounds", ABSENT, ABSENT
        return f"{100 * fleet['accuracy']:.2f}", *(f"{fleet['refused'][one]:.0%}" for one in ("hostile", "honest"))

    lines = [(row["data"], f"`{row['method']}`", f"`{row['attack']}`", f"`{row['setting']}`",
              RUINED if row["simulated"] is None else f"{100 * row['simulated']:.2f}", *of(row["live"]))
             for row in found]
    heads = ("data", "method", "attack", "setting", "simulation", "fleet", "hostile refused", "honest refused")
    return markdown.table(heads, lines) if lines else "Not run.\n"


def summarize(found: Sequence[Row], page: Path) -> None:
    """Writes the table of docs/robust.md into the page."""
    text = markdown.filled(page.read_text(encoding="utf-8"), {"hostile": summary(found)})
    page.write_text(text, encoding="utf-8")


def summary(found: Sequence[Row], share: float = 0.2) -> str:
    """Some attacks on two methods and both sets, as in ``table``."""
    known = {(row["data"], row["method"], row["attack"], row["setting"]): row for row in found
             if row["share"] == share}
    lines = [(f"`{attack}`", data, f"`{method}`",
              *(_cell(known.get((data, method, attack, setting))) for setting in SETTINGS))
             for attack in (SIGN, BOUND, BACKDOOR, INNER) for data in DATA for method in SUMMARIZED]
    return markdown.table(("attack", "data", "method", *(f"`{setting}`" for setting in SETTINGS)), lines)


def table(found: Sequence[Row], data: str, share: float) -> str:
    """Method and attack by setting: mean accuracy of the honest devices, in percent."""
    known = {(row["method"], row["attack"], row["setting"]): row for row in found
             if (row["data"], row["share"]) == (data, share)}
    lines = [(f"`{method}`", f"`{attack}`", *(_cell(known.get((method, attack, setting))) for setting in SETTINGS))
             for method in DATA[data]["methods"] for attack in ATTACKS
             if any((method, attack, setting) in known for setting in SETTINGS)]
    heads = ("method", "attack", *(f"`{setting}`" for setting in SETTINGS))
    return markdown.table(heads, lines) if lines else "Not run.\n"


def clean(found: Sequence[Row], data: str) -> str:
    """Without attackers: accuracy by method and setting, and what a rule refuses of honest devices."""
    known = {(row["method"], row["setting"]): row for row in found if (row["data"], row["attack"]) == (data, NOBODY)}
    lines = [(f"`{method}`", *(_cell(known.get((method, setting))) for setting in SETTINGS))
             for method in DATA[data]["methods"]]
    def share(setting: str, what: str) -> str:
        values = [row["refused"][what] for (_, one), row in known.items() if one == setting and "refused" in row]
        return f"{mean(values):.0%}" if values else ABSENT

    lines += [(title, *(share(setting, what) for setting in SETTINGS))
              for title, what in (("updates refused", "honest"), ("of the device with most", "most_of_one_honest"))]
    return markdown.table(("method", *(f"`{setting}`" for setting in SETTINGS)), lines)


def within(found: Sequence[Row]) -> str:
    """By data and share: attacks on methods for which the adaptive bound, alone or with a rule, is at most ``NEAR``
    below the plain mean without hostile devices; and those for which none is, with the best one."""
    known = {(row["data"], row["share"], row["method"], row["attack"], row["setting"]): row.get("accuracy", 0.0)
             for row in found}
    lines = []
    for data in DATA:
        for share in sorted(SHARES):
            best = {(method, attack): max((known[key], setting) for setting in SETTINGS[1:]
                                          if (key := (data, share, method, attack, setting)) in known)
                    for method in DATA[data]["methods"] for attack in ATTACKS
                    if all((data, share, method, attack, setting) in known for setting in SETTINGS)}
            far = [f"`{attack}` on `{method}`: `{setting}` {100 * (known[data, 0.0, method, NOBODY, MEAN] - value):.1f}"
                   for (method, attack), (value, setting) in best.items()
                   if known[data, 0.0, method, NOBODY, MEAN] - value > NEAR]
            if best:
                lines.append((data, f"{share:.0%}", f"{len(best) - len(far)} of {len(best)}", "; ".join(far) or "-"))
    heads = ("data", "hostile", "within 3 points", "the others: the best rule, and the points lost")
    return markdown.table(heads, lines)


def refusals(found: Sequence[Row], data: str) -> str:
    """By attack and setting: shares of hostile and of honest updates that were not used, means over methods and shares.
    """
    lines = []
    for attack in ATTACKS:
        cells = []
        for setting in SETTINGS[1:]:
            taken = [row["refused"] for row in found if "refused" in row
                     and (row["data"], row["attack"], row["setting"]) == (data, attack, setting)]
            cells.append(f"{mean(one['hostile'] for one in taken):.0%} / {mean(one['honest'] for one in taken):.0%}"
                         if taken else ABSENT)
        lines.append((f"`{attack}`", *cells))
    return markdown.table(("attack", *(f"`{setting}`" for setting in SETTINGS[1:])), lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ABSENT
    if "accuracy" not in row:
        return RUINED
    text = f"{100 * row['accuracy']:.1f}"
    return f"{text} ({100 * row['backdoor']:.0f})" if "backdoor" in row else text
