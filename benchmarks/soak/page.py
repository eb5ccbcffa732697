"""The page of a soak: README.md with a table, and curves.png."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.soak.growth import Growth, of_result
from cloud_server.figures.formatting import bytes_text

TEMPLATE = Path(__file__).with_name("README.md")
COUNTS = ("descriptors", "topics")
PANELS = (
    ("memory, MiB", ("aggregator: memory", "broker: memory", "d0: memory", "d1: memory", "d3: memory")),
    ("descriptors", ("aggregator: descriptors", "broker: descriptors", "d0: descriptors", "d1: descriptors")),
    ("retained topics", ("broker: retained topics",)),
    ("fleet's folder, KiB", ("fleet's folder", "ledger", "audit log")),
    ("homes, KiB", ("d0: home", "d1: home", "d2: home", "d3: home")),
    ("retained bytes, KiB", ("broker: retained bytes",)),
)


def write(result: Mapping[str, Any], folder: Path) -> None:
    """Fills the page's tables from a result, and draws it."""
    text = TEMPLATE.read_text(encoding="utf-8")
    (folder / "README.md").write_text(markdown.filled(text, tables(result)), encoding="utf-8")
    draw(result, folder / "curves.png")


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    found = of_result(result)
    grown = [name for name, one in found.items() if one.grows]
    events = Counter(what for _, what in result["events"])
    facts = [
        ("rounds", f"{result['rounds']} of {result['planned']}"), ("minutes", f"{result['seconds'] / 60:.1f}"),
        ("rounds kept in the ledger", str(result["kept_rounds"])),
        ("warm-up", f"{result['warm_up']} rounds, and the first samples of each life of a process"),
        ("a real full disk", "yes" if result["full_disk"] else "no: this user may not mount one"),
        *((what, f"{count} times") for what, count in sorted(events.items())),
        *([("updates counted in the rounds kept", ", ".join(f"{name}: {n}" for name, n in result["counted"].items()))]
          if "counted" in result else []),
        ("**grows**", ", ".join(grown) or "nothing"),
    ]
    return {"run": markdown.table(("what", "how much"), facts),
            "growth": markdown.table(("figure", "level", "100 rounds add", "error", "samples", "verdict"),
                                     [_row(name, one) for name, one in found.items()])}


def _row(name: str, one: Growth) -> tuple[str, ...]:
    def text(value: float | None) -> str:
        if value is None:
            return "–"  # noqa: RUF001
        if name.endswith(COUNTS):
            return f"{value:.1f}"
        return ("-" if value < 0 else "") + bytes_text(abs(value))

    verdict = "no slope: its lives are too short" if one.per_100 is None else "**grows**" if one.grows else "stays"
    return name, text(one.level), text(one.per_100), text(one.error), str(one.samples), verdict


def draw(result: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for panel, (title, names) in zip(axes.flat, PANELS, strict=True):
        unit = 1 << 20 if "MiB" in title else 1 << 10 if "KiB" in title else 1
        for name in names:
            points = result["series"].get(name, [])
            panel.plot([p[0] for p in points], [p[2] / unit for p in points], linewidth=1, label=name.split(": ")[0])
        panel.set(title=title, xlabel="round", ylim=(0, None))
        panel.axvspan(0, result["warm_up"], color="0.95")
        if len(names) > 1:
            panel.legend(fontsize="small", loc="lower right")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
