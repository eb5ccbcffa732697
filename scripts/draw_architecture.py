"""Draws the two pictures of docs/architecture.md: `python3 scripts/draw_architecture.py`.

Only the standard library. ROOMS and STEPS are the content; tests/project/test_architecture.py compares them with the
code and the pictures with what this script draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"

# Package -> rows of (room, what it is for). A room imports rooms of rows below its own, never of its own row or above.
Rows = list[list[tuple[str, str]]]
ROOMS: dict[str, Rows] = {
    "cloud_server": [
        [("commands", "the command line metafleet")],
        [("laboratory.advise", "which method and model"), ("console", "the fleet in a browser")],
        [("laboratory.compare", "tables, curves"), ("laboratory.run", "simulated rounds"),
         ("devices", "enrol, revoke, flash, ask")],
        [("laboratory.plan", "experiment, samples, costs"), ("running", "aggregator process, demo")],
        [("rounds", "the round: open, receive, close"), ("integrations", "Prometheus, MLflow and others")],
        [("membership", "who belongs, is asked, waited for")],
        [("broadcast", "manifest, models, programs")],
        [("identity", "certificates and tokens")],
        [("broker", "mosquitto, publishing"), ("reports", "report, tables, live view"),
         ("choices", "methods, codecs, boards")],
        [("results", "result.json, bill, verdict")],
        [("figures", "scores, units, charts")],
        [("ledger", "rounds, devices, costs"), ("records", "checkpoints, spool, fleet.toml")],
    ],
    "edge_agent": [
        [("commands", "the command line edge-agent")],
        [("rounds", "the agent's loop"), ("http", "answers over HTTP"), ("sources", "sensors")],
        [("inference", "personalize, check, answer"), ("updates", "programs that are fetched")],
        [("compute", "child processes, ONNX sessions")],
        [("device", "state, slots, samples"), ("connection", "enrol, fetch, send")],
    ],
    "firmware_profiles": [
        [("pulled", "updates that devices fetch")],
        [("image", "cards and images"), ("ssh", "install over SSH")],
        [("package", "the agent with its wheels")],
    ],
    "export": [[("backbones", "frozen networks of ONNX files and torch modules")]],
    "fleet_core": [
        [("learning", "models, losses, training loop (torch)")],
        [("training", "a round's steps, by any engine"), ("personalization", "class means, heads, bundles"),
         ("data.partitions", "samples over devices"), ("data.sets", "named data sets")],
        [("backbone", "raw samples to features")],
        [("algorithms.methods", "one page for each method"), ("data", "samples, episodes, time split"),
         ("power", "meters, joules by phase")],
        [("model", "layout, graphs, payloads"), ("data.readers", "csv, npz, ndjson, images"),
         ("power.sensors", "PMIC, INA3221, hwmon"), ("board", "profiles and limits")],
        [("privacy", "clipping, noise, epsilon"), ("data.shaping", "images at one size")],
        [("codecs.kinds", "one file for each codec"), ("robust", "which updates are used")],
        [("algorithms", "client and server rules"), ("codecs", "what a codec is"),
         ("protocol", "messages, topics, signing"), ("link", "MQTT")],
        [("tasks", "numbers instead of classes")],
        [("base", "errors, config, storage, processes, backoff")],
    ],
}
TORCH = {"fleet_core.learning", "export.backbones", "edge_agent.compute", "cloud_server.laboratory.run"}
COMPOSERS = {"cloud_server.commands", "cloud_server.devices", "cloud_server.running"}

# The course of a round: (from, to, label). A step within one process has the same lane twice.
LANES = ("aggregator", "broker", "agent", "trainer child")
STEPS: list[tuple[str, str, str]] = [
    ("aggregator", "aggregator", "select the cohort, by seed and round"),
    ("aggregator", "broker", "model chunks, signed manifest"),
    ("broker", "agent", "manifest, which the agent verifies"),
    ("broker", "agent", "chunks of the model or its delta"),
    ("agent", "trainer child", "job: round, layout, paths"),
    ("trainer child", "trainer child", "train K steps, encode"),
    ("trainer child", "agent", "pending update and state, on disk"),
    ("agent", "aggregator", "offer: size, hashes, what it was trained from"),
    ("aggregator", "agent", "grant: which chunks to send"),
    ("agent", "aggregator", "chunks of the update"),
    ("aggregator", "aggregator", "check; accepted updates go to the spool"),
    ("aggregator", "agent", "done, or reject with the reason"),
    ("aggregator", "aggregator", "close: aggregate, checkpoint, ledger"),
    ("aggregator", "agent", "next signed manifest: which updates were counted, which model is served"),
    ("agent", "agent", "commit or discard the pending state"),
    ("broker", "agent", "chunks of the served model"),
    ("agent", "agent", "personalize, check, swap the slot, answer"),
    ("agent", "aggregator", "report: bytes, joules, evaluation"),
]

STYLE = """
  svg { background: #fff; } text { font: 13px sans-serif; fill: #1b1f24; } .small { font-size: 11px; fill: #57606a; }
  .name { font-weight: bold; } .page { fill: #fff; } .box { fill: #f6f8fa; stroke: #8c959f; }
  .room { fill: #fff; stroke: #8c959f; } .torch { stroke: #bc4c00; stroke-width: 2; }
  .composer { stroke-dasharray: 5 3; } .line { stroke: #57606a; fill: none; } .head { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117; } text { fill: #e6edf3; } .small { fill: #9198a1; } .page { fill: #0d1117; }
    .box { fill: #151b23; stroke: #656c76; } .room { fill: #0d1117; stroke: #656c76; } .torch { stroke: #f0883e; }
    .line { stroke: #9198a1; } .head { fill: #9198a1; }
  }
"""
ROOM_H, GAP, TITLE_H = 38, 8, 30


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float, both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="line" marker-end="url(#head)"{start}/>'


def picture(title: str, width: int, height: int, shapes: list[str]) -> str:
    """An SVG file with its own background, so that it is readable on a light and on a dark page."""
    head = ('<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto-start-reverse">'
            '<path d="M0,0 L9,4 L0,8 z" class="head"/></marker></defs>')
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return "\n".join([frame, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", head,
                      f'<rect width="{width}" height="{height}" class="page"/>', *shapes, "</svg>"]) + "\n"


def package_height(name: str) -> int:
    return TITLE_H + max(1, len(ROOMS[name])) * (ROOM_H + GAP) + 4


def package(name: str, x: float, y: float, width: float, about: str) -> Iterator[str]:
    """A package with its rooms, the highest row first."""
    yield rect(x, y, width, package_height(name), "box torch" if name == "export" else "box")
    yield text(x + 10, y + 20, name, "name")
    yield text(x + width - 10, y + 20, about, "small", "end")
    for row, rooms in enumerate(ROOMS[name]):
        top = y + TITLE_H + row * (ROOM_H + GAP)
        each = (width - 20 - GAP * (len(rooms) - 1)) / len(rooms)
        for place, (room, purpose) in enumerate(rooms):
            left, full = x + 10 + place * (each + GAP), f"{name}.{room}"
            kind = " torch" * (full in TORCH) + " composer" * (full in COMPOSERS)
            yield rect(left, top, each, ROOM_H, "room" + kind)
            yield text(left + 8, top + 16, room, "name")
            yield text(left + 8, top + 31, purpose, "small")


def parts() -> str:
    top, shapes = 10, list[str]()
    side = package_height("edge_agent")
    shapes += package("cloud_server", 10, top, 400, "aggregator, operator, laboratory")
    shapes += package("edge_agent", 430, top, 310, "the device")
    shapes += package("firmware_profiles", 760, top, 310, "boards, flashing")
    below = top + package_height("firmware_profiles") + 20
    shapes += package("export", 760, below, 310, "torch → ONNX graphs, checked")
    shapes += [text(770, below + 48, "one room; no sub-packages", "small")]
    middle = top + package_height("cloud_server")
    core = middle + 46
    for x, start in ((210, middle), (585, top + side), (915, below + package_height("export"))):
        shapes.append(arrow(x, start, x, core))
    shapes.append(text(220, middle + 28, "each imports fleet_core and none of its neighbours", "small"))
    shapes += package("fleet_core", 10, core, 1060, "shared: imports none of the others")
    key = core + package_height("fleet_core") + 14
    shapes += [
        rect(10, key, 22, 14, "room composer"),
        text(40, key + 12, "composer: may import the neighbours too (in running: demo, FedAvg baseline, fleet in one "
             "process)", "small"),
        rect(640, key, 22, 14, "room torch"),
        text(670, key + 12, "imports torch (in compute: trainer.py alone)", "small"),
        text(10, key + 34, "In a package a room imports only rooms in rows below its own.", "small"),
    ]
    return picture("Packages, rooms and processes", 1080, key + 240, [*shapes, *processes(key + 60)])


def processes(y: float) -> Iterator[str]:
    boxes = (
        (10, 230, "aggregator", "metafleet server start", "holds ledger, checkpoints, keys"),
        (300, 170, "broker", "mosquitto or amqtt", "retains chunks, manifest"),
        (530, 230, "agent", "edge-agent run", "holds samples, slots, state"),
        (840, 230, "trainer child", "edge_agent.compute.trainer", "loads torch; ends when no round is open"),
    )
    yield text(10, y, "Processes", "name")
    for x, width, name, program, about in boxes:
        yield rect(x, y + 14, width, 62, "box torch" if name == "trainer child" else "box")
        yield text(x + 10, y + 33, name, "name")
        yield text(x + 10, y + 50, program, "small")
        yield text(x + 10, y + 66, about, "small")
    for x1, x2, label in ((240, 300, "MQTT"), (470, 530, "MQTT"), (760, 840, "pipes")):
        yield arrow(x1, y + 45, x2, y + 45, both=True)
        yield text((x1 + x2) / 2, y + 38, label, "small", "middle")
    yield rect(840, y + 96, 230, 62, "box")
    yield text(850, y + 115, "adapter child", "name")
    yield text(850, y + 132, "edge_agent.compute.adapter", "small")
    yield text(850, y + 148, "gradient steps in ONNX Runtime; one job", "small")
    yield arrow(760, y + 64, 840, y + 122, both=True)
    yield rect(530, y + 96, 230, 62, "box")
    yield text(540, y + 115, "HTTP server", "name")
    yield text(540, y + 132, "edge-agent serve, or in the agent", "small")
    yield text(540, y + 148, "reads the slots from the disk", "small")
    yield text(10, y + 115, "One agent for each device; a fleet has one aggregator and one broker.", "small")
    yield text(10, y + 132, "Aggregator and agents share no disk: all that passes between them is MQTT.", "small")


def course() -> str:
    width, step_h, top = 1080, 34, 56
    lane = {name: 130 + 273 * place for place, name in enumerate(LANES)}
    bottom = top + step_h * len(STEPS) + 10
    shapes = []
    for name, x in lane.items():
        shapes += [rect(x - 70, 10, 140, 28, "box"), text(x, 29, name, "name", "middle"),
                   f'<line x1="{x}" y1="38" x2="{x}" y2="{bottom}" class="line" stroke-dasharray="2 4"/>']
    for number, (start, end, label) in enumerate(STEPS, 1):
        y = top + step_h * number - 12
        x1, x2 = lane[start], lane[end]
        said = f"{number}. {label}"
        if start == end:
            wide = 7 * len(said) + 12
            left = min(max(x1 - wide / 2, 6), width - wide - 6)
            shapes += [rect(left, y - 18, wide, 24, "room"), text(left + wide / 2, y - 1, said, "", "middle")]
        else:
            shapes += [arrow(x1, y, x2, y), label_on(min(x1, x2) + abs(x2 - x1) / 2, y - 5, said)]
    return picture("A round", width, bottom + 10, shapes)


def label_on(x: float, y: float, said: str) -> str:
    """A label with the page's colour behind it, where it crosses a lane."""
    wide = 6.6 * len(said)
    return f'<rect x="{x - wide / 2:g}" y="{y - 11:g}" width="{wide:g}" height="13" class="page"/>' + text(
        x, y, said, "", "middle")


PICTURES = {"architecture-parts.svg": parts, "architecture-round.svg": course}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw(), encoding="utf-8")
