"""The curves of a comparison: accuracy, or what a task has in its place, against cost, as curves.png and as
charts of the page.

Colours: Okabe and Ito, "Color Universal Design", 2008, with Tol's indigo instead of their yellow, which is too light
for a line. Dashes distinguish the labels without colour."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cloud_server.figures import charts as svg_charts
from cloud_server.figures.charts import MARKED_POINTS, Line, line_chart, ticks
from cloud_server.laboratory.compare.comparison import AXES, MODELS, Comparison, Entry, Measure, Step
from fleet_core.base.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d", "#332288")
ON_DARK = ("#4fb3e8", "#ff8a3d", "#2bc79b", "#e6a3c8", "#f0b93a", "#8fd0f5", "#c9c9c9", "#a79be8")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 2), (9, 2, 2, 2))
UNITS = {"payload_bytes": "B", "flops": "FLOP", "joules": "J"}
PREFIXES = ("", "k", "M", "G", "T", "P")
DPI, PANEL_INCHES, COLUMNS = 150, (4.6, 3.5), 2
SWATCH_WIDTH = 36
MAX_LABELS_IN_PANEL = 14


@dataclass(frozen=True)
class Curve:
    """A label's line in one chart. number: index of its colour and dashes. points: (cost, accuracy). low, high: the
    band, mean ∓ one standard deviation over seeds; empty for one seed. free: it has no cost, so the line is level at
    its last accuracy."""

    label: str
    number: int
    points: Sequence[tuple[float, float]]
    low: Sequence[tuple[float, float]]
    high: Sequence[tuple[float, float]]
    free: bool = False


@dataclass(frozen=True)
class Chart:
    """The chart of one measure of cost. unit: with its prefix; the points are in this unit. model: the kind of model
    that devices are evaluated under; empty for the served one."""

    measure: Measure
    unit: str
    curves: tuple[Curve, ...]
    model: str = ""

    @property
    def title(self) -> str:
        return self.measure.title + (f", under the {MODELS[self.model]}" if self.model else "")

    @property
    def axis(self) -> str:
        return f"{self.title}, {self.unit}" if self.unit else self.title


def charts(comparison: Comparison) -> list[Chart]:
    """A chart for every measure that is known for a label with a curve, and one against the rounds for each kind of
    model that devices were evaluated under."""
    every = [*((measure, "") for measure in AXES), *((AXES[0], model) for model in MODELS)]
    return [chart for measure, model in every if (chart := _chart(comparison, measure, model)) is not None]


def _chart(comparison: Comparison, measure: Measure, model: str) -> Chart | None:
    highest = math.inf if comparison.figure.lower else 1.0
    taken = [
        (number, entry, [_under(model, step) for step in entry.curve
                         if measure.key in step.spent and (not model or model in step.models)])
        for number, entry in enumerate(comparison.entries)
    ]
    top = max((step.spent[measure.key] for _, _, steps in taken for step in steps), default=0.0)
    if top <= 0:
        return None
    size, unit = _scale(measure.key, top)
    curves = (_curve(number, entry, steps, measure.key, size, top, highest) for number, entry, steps in taken if steps)
    return Chart(measure, unit, tuple(curves), model)


def _under(model: str, step: Step) -> Step:
    return replace(step, accuracy=step.models[model]) if model else step


def _scale(key: str, top: float) -> tuple[float, str]:
    """(divisor of the amounts, unit with its prefix) for an axis up to ``top``."""
    if key not in UNITS:
        return 1.0, ""
    power = min(max(0, math.floor(math.log10(top) / 3)), len(PREFIXES) - 1)
    return 1000.0**power, PREFIXES[power] + UNITS[key]


def what(comparison: Comparison) -> str:
    """What the curves show."""
    name = comparison.figure.name
    return name[0].upper() + name[1:]


def _curve(
    number: int, entry: Entry, steps: Sequence[Step], key: str, size: float, top: float, highest: float
) -> Curve:
    """highest: the largest possible value."""
    if steps[-1].spent[key] == 0:
        last = steps[-1].accuracy.mean
        return Curve(entry.label, number, [(0.0, last), (top / size, last)], (), (), free=True)
    at = [(step.spent[key] / size, step.accuracy) for step in steps]
    spread = [(x, y.mean, y.std) for x, y in at if y.std is not None]
    return Curve(
        entry.label, number, [(x, y.mean) for x, y in at], [(x, max(0.0, y - std)) for x, y, std in spread],
        [(x, min(highest, y + std)) for x, y, std in spread],
    )


def style(number: int) -> tuple[str, tuple[float, ...]]:
    """(colour, dashes) of the label with this index. The pairs repeat after 32 labels."""
    again, colour = divmod(number, len(COLOURS))
    return COLOURS[colour], DASHES[(colour + again) % len(DASHES)]


# In the page ----------------------------------------------------------------------------------------------------------


def svg(chart: Chart, what: str = "Accuracy") -> str:
    """The chart as an SVG element; its colours are defined by ``css``."""
    lines = [Line(curve.label, f"c{curve.number}", curve.points) for curve in chart.curves]
    bands = [(Line("", f"c{curve.number}", curve.low), Line("", "", curve.high)) for curve in chart.curves if curve.low]
    values = [y for curve in chart.curves for _, y in (*curve.points, *curve.low, *curve.high)]
    ends = "; ".join(f"{curve.label} {curve.points[-1][1]:.3f}" for curve in chart.curves)
    return line_chart(
        f"curve-{chart.measure.key}{chart.model}", f"{what} against {chart.title}", f"At the end: {ends}.", lines,
        bands=bands, y_ticks=ticks(max(0.0, min(values) - 0.02), max(values)), y_text="{:.2f}".format,
        x_label=chart.axis, x_text=None if chart.measure.key == "rounds" else "{:,g}".format, x_from=0.0,
    )


def legend(curves: Sequence[Curve]) -> str:
    return svg_charts.legend([Line(curve.label, f"c{curve.number}", ()) for curve in curves], SWATCH_WIDTH)


def css(count: int) -> str:
    """Colours and dashes of ``count`` labels, for light and dark pages."""
    def rules(colours: Sequence[str]) -> str:
        return "".join(
            f"polyline.c{n},line.c{n}{{stroke:{colours[n % len(colours)]};"
            f"stroke-dasharray:{' '.join(map(str, style(n)[1])) or 'none'}}}"
            f"circle.c{n},.band.c{n}{{fill:{colours[n % len(colours)]}}}"
            for n in range(count)
        )

    return f"svg .band{{opacity:.16}}{rules(COLOURS)}@media (prefers-color-scheme:dark){{{rules(ON_DARK)}}}"


# As a picture ---------------------------------------------------------------------------------------------------------


def png(comparison: Comparison, title: str) -> bytes:
    """All charts in one PNG picture. Raises ConfigError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("matplotlib is not installed", hint='pip install "metafleet[lab]"') from error
    found = charts(comparison)
    columns = min(COLUMNS, max(1, len(found)))
    rows = max(1, math.ceil(len(found) / columns))
    figure = Figure(figsize=(columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + 0.9), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for place, chart in enumerate(found):
        _draw(panels[place], chart, f"{what(comparison)}, mean over devices" if place % columns == 0 else "")
    for panel in panels[len(found):]:
        panel.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    lines = {line.get_label(): line for panel in panels for line in panel.get_lines()}
    look: dict[str, Any] = {"frameon": False, "handlelength": 4}
    if len(lines) <= MAX_LABELS_IN_PANEL and len(found) < len(panels):
        panels[-1].legend(lines.values(), lines.keys(), loc="center left", fontsize=11, **look)
    elif lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower left", ncols=columns, fontsize=9, **look)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw(panel: Axes, chart: Chart, label: str) -> None:
    for curve in chart.curves:
        colour, dashes = style(curve.number)
        look: dict[str, Any] = {"color": colour, "linewidth": 1.8, "label": curve.label}
        if dashes:
            look["dashes"] = dashes
        if not curve.free and len(curve.points) <= MARKED_POINTS:
            look |= {"marker": "o", "markersize": 3.5}
        panel.plot(*zip(*curve.points, strict=True), **look)
        if curve.low:
            xs, low = zip(*curve.low, strict=True)
            panel.fill_between(xs, low, [y for _, y in curve.high], color=colour, alpha=0.15, linewidth=0)
    panel.set_xlabel(chart.axis)
    panel.set_xlim(left=0)
    if label:
        panel.set_ylabel(label)
    panel.xaxis.set_major_formatter("{x:,g}")
    panel.grid(color="#dddddd", linewidth=0.7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_axisbelow(True)
