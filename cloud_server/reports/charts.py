"""Line charts as inline SVG: axes, ticks, a title and a description; colours and type come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 268, 64, 12, 10, 40
MARKED_POINTS = 12  # up to so many points carry a dot


@dataclass(frozen=True)
class Line:
    """name: its place in the legend. style: the CSS class that colours and dashes it. points: (x, y), x rising."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, about ``count`` of them."""
    rough = max(high - low, 1e-12) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((m * unit for m in (1, 2, 2.5, 5) if m * unit >= rough * (1 - 1e-9)), 10 * unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(
    name: str, title: str, description: str, lines: Sequence[Line], *, y_ticks: Sequence[float],
    y_text: Callable[[float], str], x_label: str, bands: Sequence[tuple[Line, Line]] = (),
    x_text: Callable[[float], str] | None = None, x_from: float | None = None,
) -> str:  # fmt: skip
    """An SVG element. name: unique in the page. y_ticks: rising, from axis to top. bands: (lower, upper), filled.
    x_text: None for whole numbers alone. x_from: where the axis begins, None for the first point."""
    x_low = min(p[0] for line in lines for p in line.points) if x_from is None else x_from
    x_high = max(max(p[0] for line in lines for p in line.points), x_low + 1)

    def x(value: float) -> float:
        return round(LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM), 1)

    def trail(points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x(px)},{y(py)}" for px, py in points)

    def parts() -> Iterator[str]:
        floor, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
        for value in y_ticks:
            at, style = y(value), "axis" if value == y_ticks[0] else "grid"
            yield f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
            yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(y_text(value))}</text>'
        for value in (v for v in ticks(x_low, x_high, 6) if x_low <= v <= x_high and (x_text or v == int(v))):
            label = x_text(value) if x_text else f"{value:.0f}"
            yield f'<line class="axis" x1="{x(value)}" x2="{x(value)}" y1="{floor}" y2="{floor + 4}"/>'
            yield f'<text x="{x(value)}" y="{floor + 18}" text-anchor="middle">{escape(label)}</text>'
        yield f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>'
        for lower, upper in bands:
            trails = trail([*lower.points, *reversed(upper.points)])
            yield f'<polygon class="band {lower.style}" points="{trails}"/>'
        for line in lines:
            yield f'<polyline class="{line.style}" points="{trail(line.points)}"/>'
            for px, py in line.points if len(line.points) <= MARKED_POINTS else line.points[-1:]:
                yield f'<circle class="{line.style}" cx="{x(px)}" cy="{y(py)}" r="2.8"/>'

    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-text">{escape(description)}</desc>'
        + "".join(parts()) + "</svg>"
    )  # fmt: skip


def legend(lines: Sequence[Line]) -> str:
    """The lines' names, each beside a piece of it, as an HTML list."""
    sample = '<line class="{}" x1="1" x2="25" y1="5" y2="5"/>'
    swatch = f'<svg class="swatch" viewBox="0 0 26 10" aria-hidden="true">{sample}</svg>'
    items = "".join(f"<li>{swatch.format(line.style)}{escape(line.name)}</li>" for line in lines)
    return f'<ul class="legend">{items}</ul>'
