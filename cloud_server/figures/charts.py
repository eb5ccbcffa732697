"""Line charts as inline SVG, with a title and a description. The page's CSS defines colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 268, 64, 12, 10, 40
MARKED_POINTS = 12  # lines with up to this many points get a dot on each
SWATCH_WIDTH = 26

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """name: for the legend. style: a CSS class for colour and dashes. points: (x, y) with rising x."""

    name: str
    style: str
    points: Points


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return round(LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from at or below ``low`` to at or above ``high``."""
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
    """An SVG element. name: unique in the page. y_ticks: rising, from the axis to the top. bands: (lower, upper),
    filled. x_text: None for whole numbers only. x_from: start of the axis, None for the first point."""
    x_low = min(x for line in lines for x, _ in line.points) if x_from is None else x_from
    x_high = max(max(x for line in lines for x, _ in line.points), x_low + 1)
    scale = _Scale(x_low, x_high, y_ticks[0], y_ticks[-1])
    parts = [*_y_axis(scale, y_ticks, y_text), *_x_axis(scale, x_label, x_text), *_bands(scale, bands),
             *_lines(scale, lines)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-title {name}-text">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-text">{escape(description)}</desc>'
        + "".join(parts) + "</svg>"
    )  # fmt: skip


def _y_axis(scale: _Scale, y_ticks: Sequence[float], text: Callable[[float], str]) -> Iterator[str]:
    for value in y_ticks:
        at, style = scale.y(value), "axis" if value == y_ticks[0] else "grid"
        yield f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text(value))}</text>'


def _x_axis(scale: _Scale, label: str, text: Callable[[float], str] | None) -> Iterator[str]:
    floor, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    for value in ticks(scale.x_low, scale.x_high, 6):
        if scale.x_low <= value <= scale.x_high and (text or value == int(value)):
            at, shown = scale.x(value), text(value) if text else f"{value:.0f}"
            yield f'<line class="axis" x1="{at}" x2="{at}" y1="{floor}" y2="{floor + 4}"/>'
            yield f'<text x="{at}" y="{floor + 18}" text-anchor="middle">{escape(shown)}</text>'
    yield f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>'


def _bands(scale: _Scale, bands: Sequence[tuple[Line, Line]]) -> Iterator[str]:
    for lower, upper in bands:
        outline = scale.path([*lower.points, *reversed(upper.points)])
        yield f'<polygon class="band {lower.style}" points="{outline}"/>'


def _lines(scale: _Scale, lines: Sequence[Line]) -> Iterator[str]:
    for line in lines:
        yield f'<polyline class="{line.style}" points="{scale.path(line.points)}"/>'
        for x, y in line.points if len(line.points) <= MARKED_POINTS else line.points[-1:]:
            yield f'<circle class="{line.style}" cx="{scale.x(x)}" cy="{scale.y(y)}" r="2.8"/>'


def swatch(style: str, width: int = SWATCH_WIDTH) -> str:
    """A short piece of a line, for a legend. style: its CSS class."""
    return (f'<svg class="swatch" viewBox="0 0 {width} 10" aria-hidden="true"><line class="{style}" x1="1" '
            f'x2="{width - 1}" y1="5" y2="5"/></svg>')


def legend(lines: Sequence[Line], width: int = SWATCH_WIDTH) -> str:
    """The lines' names, each beside a swatch, as an HTML list."""
    items = "".join(f"<li>{swatch(line.style, width)}{escape(line.name)}</li>" for line in lines)
    return f'<ul class="legend">{items}</ul>'
