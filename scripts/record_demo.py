"""Records `metafleet demo` in a terminal and draws the recording: `.venv/bin/python scripts/record_demo.py`.

Writes docs/demo.cast (asciicast v2: what the program wrote, and when) and docs/demo.svg, an animation made of it that
needs no script. `--draw` draws the recording that is there again. Pauses longer than PAUSE_S are shortened to it, and
what is left is shown SPEED times as fast; the picture says so.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import pty
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pyte

DOCS = Path(__file__).resolve().parent.parent / "docs"
CAST, PICTURE = DOCS / "demo.cast", DOCS / "demo.svg"
COMMAND = ("metafleet", "demo", "--devices", "4", "--rounds", "10", "--new-devices", "1", "--out")
COLUMNS, ROWS = 100, 30
PAUSE_S, SPEED, FRAME_S, LAST_S = 2.0, 2.0, 0.4, 12.0
WIDTH, HEIGHT, LEFT, TOP = 8.0, 18.0, 16.0, 44.0
COLOURS = {"default": "#e6e8ea", "black": "#5c6570", "red": "#ff8a80", "green": "#6fcf97", "brown": "#f0a35e",
           "yellow": "#f0a35e", "blue": "#62bfe2", "magenta": "#b3a0f0", "cyan": "#62bfe2", "white": "#ffffff"}

Event = tuple[float, str]
Run = tuple[str, str, bool]
Lines = tuple[tuple[Run, ...], ...]


def record(command: list[str]) -> list[Event]:
    """Runs the command in a terminal of COLUMNS × ROWS; (seconds since its start, what it wrote)."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, events, decoder = time.monotonic(), list[Event](), codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the terminal is closed: the program has ended
            data = b""
        if not data:
            break
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        events.append((round(time.monotonic() - began, 3), decoder.decode(data)))
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("the demo failed: nothing is written")
    return events


def frames(events: list[Event]) -> Iterator[tuple[float, Lines]]:
    """(second at which it is shown, the screen's lines) of every screen that differs from the one before."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    at, changed_s, shown_at, last, shown = 0.0, 0.0, -FRAME_S, Lines(), Lines()
    for second, text in events:
        stream.feed(text)
        lines = tuple(_runs(screen.buffer[row]) for row in range(ROWS))
        if lines != last:
            at += min(second - changed_s, PAUSE_S) / SPEED
            changed_s, last = second, lines
            if at - shown_at >= FRAME_S:
                yield at, lines
                shown_at, shown = at, lines
    if last != shown:
        yield max(at, shown_at + FRAME_S), last


def _runs(line: Any) -> tuple[Run, ...]:
    """Characters of one style together: (text, colour, bold)."""
    runs: list[Run] = []
    for column in range(COLUMNS):
        one = line[column]
        style = (COLOURS.get(one.fg, f"#{one.fg}" if len(one.fg) == 6 else COLOURS["default"]), bool(one.bold))
        if runs and runs[-1][1:] == style:
            runs[-1] = (runs[-1][0] + one.data, *style)
        else:
            runs.append((one.data, *style))
    while runs and not runs[-1][0].strip():
        runs.pop()
    return tuple(runs)


def draw(events: list[Event], said: str) -> str:
    """The animation as SVG. A line that is the same in several frames is drawn once."""
    shown = list(frames(events))
    end = shown[-1][0] + LAST_S
    width, height = COLUMNS * WIDTH + 2 * LEFT, ROWS * HEIGHT + TOP + 14
    lines: dict[tuple[Run, ...], str] = {}
    groups, rules = [], []
    for number, (at, screen) in enumerate(shown):
        until = shown[number + 1][0] if number + 1 < len(shown) else end
        uses = [f'<use href="#{lines.setdefault(line, f"l{len(lines)}")}" y="{TOP + HEIGHT * row:g}"/>'
                for row, line in enumerate(screen) if line]
        groups.append(f'<g class="f" id="f{number}">{"".join(uses)}</g>')
        rules.append(f"@keyframes k{number}{{0%{{visibility:{'visible' if at == 0 else 'hidden'}}}"
                     f"{100 * at / end:.3f}%{{visibility:visible}}{100 * until / end:.3f}%{{visibility:"
                     f"{'visible' if number + 1 == len(shown) else 'hidden'}}}}}#f{number}{{animation-name:k{number}}}")
    drawn = "".join(f'<text id="{name}" x="{LEFT:g}">{"".join(map(_span, line))}</text>'
                    for line, name in lines.items())
    still = f"@media (prefers-reduced-motion:reduce){{.f{{animation:none}}#f{len(shown) - 1}{{visibility:visible}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(said)}">'
        f"<title>{escape(said)}</title><style>text{{font:13.3px ui-monospace,'DejaVu Sans Mono',Menlo,monospace;"
        f"white-space:pre;fill:{COLOURS['default']}}}.f{{visibility:hidden;animation:{end:.2f}s step-end infinite}}"
        f"{''.join(rules)}{still}</style><rect width=\"100%\" height=\"100%\" rx=\"10\" fill=\"#131619\"/>"
        f'<circle cx="20" cy="17" r="5" fill="#ff8a80"/><circle cx="38" cy="17" r="5" fill="#f0a35e"/>'
        f'<circle cx="56" cy="17" r="5" fill="#6fcf97"/><text x="80" y="21" style="fill:#9ba5af">{escape(said)}</text>'
        f"<defs>{drawn}</defs>{''.join(groups)}</svg>\n"
    )


def _span(run: Run) -> str:
    text, colour, bold = run
    style = ("" if colour == COLOURS["default"] else f' fill="{colour}"') + (' font-weight="700"' if bold else "")
    return f"<tspan{style}>{escape(text)}</tspan>"


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--draw", action="store_true", help="draw the recording that is there")
    if not arguments.parse_args().draw:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
            os.chdir(folder)
            events = record([*COMMAND, "demo"])
        head = {"version": 2, "width": COLUMNS, "height": ROWS, "command": " ".join((*COMMAND[:-1],))}
        CAST.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *(
            [at, "o", text] for at, text in events))), encoding="utf-8")
    said, events = recorded()
    PICTURE.write_text(draw(events, said), encoding="utf-8")


def recorded() -> tuple[str, list[Event]]:
    """(a sentence about the recording, its events)."""
    head, *rows = [json.loads(line) for line in CAST.read_text(encoding="utf-8").splitlines()]
    events = [(float(at), str(text)) for at, _, text in rows]
    return f"{head['command']} ({events[-1][0]:.0f} s; pauses cut, {SPEED:g} times as fast)", events


if __name__ == "__main__":
    main()
