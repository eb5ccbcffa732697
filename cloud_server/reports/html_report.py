"""``report.html``: a result.json as one self-contained page: figures, devices, curves, bytes, joules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from cloud_server.figures.charts import Line, legend, line_chart, ticks
from cloud_server.figures.formatting import (
    ABSENT,
    NOT_COUNTED,
    absent_text,
    bytes_text,
    count_text,
    flops_text,
    joules_text,
    method_text,
    missing_text,
    phase_text,
    share_text,
    spread_text,
    stage_text,
)
from cloud_server.figures.html_elements import card, cards, heading, page, row, text_table
from cloud_server.figures.html_style import STYLE
from cloud_server.figures.scores import Score, TaskScore
from cloud_server.ledger.ledger_sums import Bytes, Joules, PhaseJoules
from cloud_server.reports import array_tables, codec_tables, cost_tables, html_costs, privacy_tables
from cloud_server.reports.html_costs import Pricing
from cloud_server.results import outcome
from cloud_server.results import result as results
from cloud_server.results.result import Personalization, Pooled, Result, RoundFigures
from cloud_server.results.verdict import compared
from fleet_core.power.meter import WORKING
from fleet_core.tasks import anomaly, labels, regression
from fleet_core.tasks.labels import OVERALL

COUNTERS = (("payload", "payload_bytes"), ("MQTT", "mqtt_bytes"), ("wire", "wire_bytes"))
COUNTERS_NOTE = (
    '<p class="note">Three counters, none an estimate of another: encoded models and updates; '
    "what went through the MQTT sockets; what TCP and IP made of it on the wire.</p>"
)
ABOUT = {
    regression.KIND: "Mean absolute error in the unit of each output, lower is better; R² is the share of the targets' "
    "variance that the answers explain, 1 at best.",
    labels.KIND: "F1 of each label, where some sample carries it or some answer names it; micro: of the counts of all "
    "labels together; macro: the mean over labels; exact match: the share of samples with all labels right.",
    anomaly.KIND: "Alarms: the share of samples above the device's own threshold, false alarms if they are quiet; the "
    "score is the mean squared difference from the model's repetition; AUROC: the chance that an anomaly has a higher "
    "score than a quiet sample of its device.",
}
"""What the measures of a task are."""
CALIBRATION_NOTE = (
    "Calibration error: the mean difference between the probability of the answered class and how often such answers "
    "are right (expected calibration error); 0 at best, too high where samples are few."
)
UNPRICED = Pricing()
HEADS = "", "accuracy", "macro-F1", "calibration error"
BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def render(
    result: Mapping[str, Any], *, title: str, pricing: Pricing = UNPRICED,
    against: tuple[str, Mapping[str, Any]] | None = None,
) -> str:
    """The page of a finished or interrupted run. against: (name, result) of a run to compare it with. Raises DataError
    if a result is no result.json."""
    run = results.parse(result)
    made = _cards, _verdict, _devices, _curves, _traffic, _codecs, _arrays, _privacy, _energy
    sections = [*(section(run) for section in made), html_costs.section(run, pricing), _settings(run)]
    if against is not None:
        sections.insert(1, _against(run, against[0], results.parse(against[1])))
    return page(title, STYLE, "\n".join([_heading(run, title), *filter(None, sections)]))


def _heading(run: Result, title: str) -> str:
    new = sum(p.new for p in run.personalization)
    facts = [method_text(run.method), count_text(run.devices, "device") + (f" and {new} new" if new else ""),
             count_text(run.closed, "round"), f"seed {run.seed}"]  # fmt: skip
    return heading(title, " · ".join(facts))


def _cards(run: Result) -> str:
    energy = run.totals.energy_j if run.totals else None
    return cards([
        _task_card(run.task) if run.task else _evaluated_card("Macro-F1, all evaluated devices", run.evaluated),
        _evaluated_card("Macro-F1, new devices", run.new_devices) if run.new_devices else "",
        _byte_card(run),
        card("Energy, all devices", _figure(joules_text(energy)), _energy_origin(energy))
        if energy
        else card("Energy, all devices", joules_text(None), "; ".join(_absent(run)) or "no meter and no cited watts"),
    ])


def _energy_origin(energy: Joules) -> str:
    spread = spread_text(energy)
    return (f"{spread}; " if spread else "") + energy.source + missing_text(energy.missing)


def _absent(run: Result) -> list[str]:
    """What the joules do not include, and why."""
    devices = run.devices + sum(p.new for p in run.personalization)
    return list(absent_text(run.totals.absent_energy if run.totals else None, devices))


def _byte_card(run: Result) -> str:
    fleet = run.devices + sum(p.new for p in run.personalization)
    if run.totals is None or run.totals.payload_bytes is None or not fleet:
        return card("Bytes per device", NOT_COUNTED, "")
    moved, wire = run.totals.payload_bytes, run.totals.wire_bytes
    under = "payload, up and down" + (f"; on the wire {bytes_text((wire.up + wire.down) / fleet)}" if wire else "")
    return card("Bytes per device", _figure(bytes_text((moved.up + moved.down) / fleet)), under)


def _evaluated_card(title: str, evaluated: Pooled | None) -> str:
    if evaluated is None:
        return card(title, "not evaluated yet", "")
    after = share_text(evaluated.macro_f1)
    if evaluated.before is None:
        return card(title, after, stage_text("after", evaluated.method))
    figure = f'<span class="from">{share_text(evaluated.before.macro_f1)} →</span> {after}'
    labels = [stage_text("before", evaluated.before.method), stage_text("after", evaluated.method)]
    return card(title, figure, " → ".join(labels))


def _task_card(scores: Mapping[str, TaskScore]) -> str:
    """The pooled measure of a fleet without classes, after personalization if there is one."""
    stage, score = list(scores.items())[-1]
    return card(f"{score.head}, all evaluated devices", escape(score.short_text), stage_text(stage, score.method))


def _figure(text: str) -> str:
    number, _, unit = text.partition(" ")
    return f'{escape(number)} <span class="unit">{escape(unit)}</span>'


def _against(run: Result, name: str, other: Result) -> str:
    """This run beside another one."""
    heads = ("", "this run", name, "change")
    figures = text_table(heads, [one.cells() for one in outcome.differences(run, other)])
    changed = outcome.changed_settings(run, other)
    settings = text_table(("setting", *heads[1:3]), changed, "left") if changed else \
        "<p class='soft'>The settings are the same.</p>"
    note = '<p class="note">Change: of accuracy and F1 the difference, of all others relative to the other run.</p>'
    return f"<h2>Against {escape(name)}</h2>{note}{figures}<h3>Settings that differ</h3>{settings}"


def _verdict(run: Result) -> str:
    """The warnings, and a table of the compared scores."""
    if run.verdict is None:
        return ""
    found = run.verdict
    warnings = "".join(f'<p class="warning" role="alert">Warning: {escape(text)}</p>' for text in found.warnings)
    rows = [(text, *map(share_text, (score.accuracy, score.macro_f1, score.calibration_error)))
            for text, score in compared(found)]
    on = f"{count_text(found.samples, 'held-back sample')} of {count_text(found.devices, 'device')}"
    note = f'<p class="note">After round {found.round}, on {on}, over the classes that occur.</p>'
    return f"<h2>Is the fleet any good?</h2>{warnings}{note}{text_table(HEADS, rows)}"


def _devices(run: Result) -> str:
    if run.task is not None:
        return _task(run)
    if not run.personalization:
        return "<h2>Devices</h2><p class='soft'>No device was evaluated in this run.</p>"
    stages = run.stages()
    names = [escape(stage_text(stage, method)) for stage, method in stages.items()]
    headings = "".join(f'<th class="stage first" scope="colgroup" colspan="3">{name}</th>' for name in names)
    accuracy = '<th class="first" scope="col">acc<span class="wide">uracy</span></th>'
    f1 = '<th scope="col"><span class="wide">macro-</span>F1</th>'
    error = '<th scope="col">cal<span class="wide">ibration error</span></th>'
    measures = (accuracy + f1 + error) * len(stages)
    rows = "".join(_device_row(_device_name(p), [(s, p.at(s)) for s in stages]) for p in run.personalization)
    sums = "".join(
        _device_row(name, [(s, evaluated.at(s)) for s in stages])
        for name, evaluated in (("All, pooled", run.evaluated), ("New, pooled", run.new_devices))
        if evaluated
    )
    return (
        "<h2>What personalization brought</h2>"
        '<p class="note" id="how">Accuracy and macro-F1 of each device on its own test samples, over the classes that '
        "it holds. Pooled: all test samples together, over all classes, a class that was missed counting 0. "
        f"{CALIBRATION_NOTE}</p>"
        '<div class="table"><table aria-describedby="how"><thead>'
        f'<tr><th rowspan="2" scope="col">device</th>{headings}</tr><tr>{measures}</tr></thead>'
        f"<tbody>{rows}</tbody>" + (f'<tbody class="pooled">{sums}</tbody>' if sums else "") + "</table></div>"
    )


def _task(run: Result) -> str:
    """The measures of each device, stage and output of a fleet without classes."""
    groups = [(p.device + " (new)" * p.new, p.task) for p in run.personalization]
    groups += [("All, pooled", run.task), ("New, pooled", run.task_new_devices)]
    rows = [
        (name, stage_text(stage, score.method), *cells, str(score.samples))
        for name, scores in groups for stage, score in (scores or {}).items() for cells in _measures(score)
    ]
    kinds = {score.task for scores in (run.task or {}, run.task_new_devices or {}) for score in scores.values()}
    about = "".join(ABOUT.get(kind, "") for kind in sorted(kinds))
    note = (f'<p class="note">{about} Of each device on its own test samples; pooled: of all test samples '
            "together.</p>")
    return f"<h2>What personalization brought</h2>{note}" + text_table(
        ("device", "stage", *_heads(kinds), "test samples"), rows)


def _heads(kinds: Collection[str]) -> tuple[str, ...]:
    """Of the cells of ``_measures``."""
    if anomaly.KIND in kinds:
        return "samples", "alarms", "mean score", "AUROC"
    return ("of", "micro-F1", "macro-F1", "exact match", "F1") if labels.KIND in kinds else ("output", "MAE", "R²")


def _measures(score: TaskScore) -> Iterator[tuple[str, ...]]:
    """The cells of each output, and of labels first those of all together."""
    of = score.measures
    if score.task == anomaly.KIND:
        auroc = share_text(of.get("auroc", {}).get("all"))
        for name, share in of.get("alarms", {}).items():
            yield name, f"{share:.4f}", f"{of['score'][name]:.4g}", auroc if name == anomaly.ANOMALY else ABSENT
        return
    if score.task != labels.KIND:
        for output, mae in of.get("mae", {}).items():
            yield output, f"{mae:.4g}", share_text(of.get("r2", {}).get(output))
        return
    yield "all labels", *(share_text(of.get(key, {}).get("all")) for key in OVERALL), ABSENT
    for output, f1 in of.get("f1", {}).items():
        yield output, *(ABSENT for _ in OVERALL), share_text(f1)


def _device_name(device: Personalization) -> str:
    return escape(device.device) + ('<span class="new">new</span>' if device.new else "")


def _device_row(name: str, scores: Iterable[tuple[str, Score | None]]) -> str:
    """name: HTML."""
    return row(name, (
        f'<td class="first {stage}">{share_text(score.accuracy if score else None)}</td>'
        f'<td class="{stage}">{share_text(score.macro_f1 if score else None)}</td>'
        f'<td class="{stage}">{share_text(score.calibration_error if score else None)}</td>'
        for stage, score in scores
    ))


def _curves(run: Result) -> str:
    if not run.rounds:
        return ""
    charts = _accuracy_chart(run.rounds) + _loss_chart(run.rounds)
    evaluated = any(r.accuracy or r.task for r in run.rounds)
    note = "" if evaluated else '<p class="note">No round of this run was evaluated.</p>'
    note += f'<p class="note">{escape(cost_tables.folded_text(run))}</p>' if run.folded else ""
    return f'<h2>Learning</h2><div class="charts">{charts}</div>{note}{_task_table(run.rounds)}'


def _task_table(rounds: Sequence[RoundFigures]) -> str:
    """The measures of the devices that train, by round and output."""
    scores = [(r.round, r.task) for r in rounds if r.task]
    rows = [(str(number), *cells) for number, score in scores for cells in _measures(score)]
    return text_table(("round", *_heads({score.task for _, score in scores})), rows) if rows else ""


def _accuracy_chart(rounds: Sequence[RoundFigures]) -> str:
    evaluated = [(r.round, r.accuracy) for r in rounds if r.accuracy]
    if not evaluated:
        return ""
    mean, best, worst = (
        Line(name, style, [(n, getattr(spread, name)) for n, spread in evaluated])
        for name, style in (("mean", "one"), ("best", "three"), ("worst", "two"))
    )
    last_round, last = evaluated[-1]
    text = (
        f"After round {last_round} the mean accuracy is {share_text(last.mean)}, "
        f"the worst device's {share_text(last.worst)} and the best device's {share_text(last.best)}."
    )
    rows = [(str(n), share_text(s.mean), share_text(s.worst), share_text(s.best)) for n, s in evaluated]
    chart = line_chart(
        "accuracy", "Accuracy of the devices over the rounds", text, [mean, best, worst], bands=[(worst, best)],
        y_ticks=ticks(max(0.0, min(s.worst for _, s in evaluated) - 0.02), 1.0), y_text="{:.2f}".format,
        x_label="round",
    )  # fmt: skip
    table = text_table(("round", "mean", "worst", "best"), rows)
    return _chart("Accuracy of the devices", [mean, best, worst], chart, table)


def _loss_chart(rounds: Sequence[RoundFigures]) -> str:
    losses = [(r.round, r.loss) for r in rounds if r.loss is not None]
    if not losses:
        return ""
    low, high = min(0.0, *(v for _, v in losses)), max(v for _, v in losses)
    (first, start), (last, end) = losses[0], losses[-1]
    text = f"From {start:.3g} in round {first} to {end:.3g} in round {last}."
    line = Line("mean over the participants", "one", losses)
    chart = line_chart(
        "loss", "Training loss over the rounds", text, [line],
        y_ticks=ticks(low, high if high > low else low + 1), y_text="{:.3g}".format, x_label="round",
    )  # fmt: skip
    table = text_table(("round", "loss"), [(str(n), f"{v:.4g}") for n, v in losses])
    return _chart("Training loss", [line], chart, table)


def _traffic(run: Result) -> str:
    sums = run.totals
    if sums is None or sums.payload_bytes is None:
        return f"<h2>Bytes</h2><p class='soft'>{NOT_COUNTED}</p>"
    ways = {way: _cumulative(run, way) for way in ("up", "down")}
    top = max((line.points[-1][1] for lines in ways.values() for line in lines), default=0.0)
    charts = "".join(_byte_chart(way, lines, top) for way, lines in ways.items() if lines and top)
    rows = [_byte_row(name, getattr(sums, key)) for name, key in COUNTERS]
    rows[1:1] = [_byte_row(f"of which {kind}", moved) for kind, moved in sorted((sums.kinds or {}).items())]
    lacks = any(row[3] for row in rows)
    table = text_table(("whole run, all devices", "up", "down", *([""] * lacks)), [row[: 3 + lacks] for row in rows])
    skipped = cost_tables.skipped_text(run)
    note = f'<p class="note">{escape(skipped)}.</p>' if skipped else ""
    return f'<h2>Bytes</h2><div class="charts">{charts}</div>{COUNTERS_NOTE}{table}{note}'


def _cumulative(run: Result, way: str) -> list[Line]:
    """Running sums of the counters that every round has: with missing rounds a line would be too low. They begin with
    the bytes of the folded rounds."""
    lines, known = [], [one for one in (run.folded, *run.rounds) if one is not None]
    numbers = [r.round for r in run.rounds]
    for (name, key), style in zip(COUNTERS, ("one", "two", "three"), strict=True):
        counts = [getattr(moved, way) for r in known if (moved := getattr(r, key))]
        if numbers and len(counts) == len(known):
            sums = list(accumulate(counts))[-len(numbers):]
            lines.append(Line(name, style, list(zip(numbers, sums, strict=True))))
    return lines


def _byte_chart(way: str, lines: Sequence[Line], top: float) -> str:
    unit, symbol = next((u, s) for u, s in BYTE_UNITS if top >= u or u == 1.0)
    ends = "; ".join(f"{line.name} {bytes_text(line.points[-1][1])}" for line in lines)
    points = list(zip(*(line.points for line in lines), strict=True))
    chart = line_chart(
        f"bytes-{way}", f"Bytes {way}, all devices, running sum over the rounds", f"After the last round: {ends}.",
        lines, y_ticks=[t * unit for t in ticks(0.0, top / unit)], y_text=lambda v: f"{v / unit:g} {symbol}",
        x_label="round",
    )  # fmt: skip
    rows = [(f"{at[0][0]:.0f}", *(bytes_text(count) for _, count in at)) for at in points]
    caption = "Up, from the devices" if way == "up" else "Down, to the devices"
    return _chart(caption, lines, chart, text_table(("round", *(line.name for line in lines)), rows))


def _byte_row(name: str, moved: Bytes | None) -> tuple[str, str, str, str]:
    if moved is None:
        return name, NOT_COUNTED, NOT_COUNTED, ""
    return name, bytes_text(moved.up), bytes_text(moved.down), missing_text(moved.missing).strip(" ()")


def _codecs(run: Result) -> str:
    """Empty where every codec was set."""
    if not codec_tables.is_auto(run.rounds):
        return ""
    heads, rows = codec_tables.spans(run.rounds)
    return f'<h2>Codecs</h2><p class="note">{escape(codec_tables.NOTE)}.</p>{text_table(heads, rows, "left")}'


def _arrays(run: Result) -> str:
    """Empty where every round trained the whole model."""
    if not array_tables.is_partial(run.rounds):
        return ""
    heads, rows = array_tables.spans(run.rounds)
    return f'<h2>Arrays</h2><p class="note">{escape(array_tables.NOTE)}.</p>{text_table(heads, rows, "left")}'


def _privacy(run: Result) -> str:
    """Empty if updates are not private."""
    heads, rows = privacy_tables.last(run.rounds)
    if not rows:
        return ""
    return f'<h2>Privacy</h2><p class="note">{escape(privacy_tables.NOTE)}.</p>{text_table(heads, rows)}'


def _energy(run: Result) -> str:
    energy: Joules | None = run.totals.energy_j if run.totals else None
    flops = run.totals.flops if run.totals else None
    work = f'<p class="note">Arithmetic, all devices: {escape(flops_text(flops))}</p>' if flops else ""
    lacks = "".join(f'<p class="note">Not in it: {escape(reason)}</p>' for reason in _absent(run))
    if energy is None:
        return f"<h2>Energy</h2><p class='soft'>{joules_text(None)}</p>{lacks}{work}"
    phases = [(phase, energy.phases[phase], energy.by_phase.get(phase)) for phase in WORKING if phase in energy.phases]
    rows = [(phase, phase_text(value), *_phase_origin(part)) for phase, value, part in phases]
    rows.append(("sum", phase_text(energy.value), spread_text(energy), ""))
    if "idle" in energy.phases:
        idle = _phase_origin(energy.by_phase.get("idle"))
        rows.append(("idle, not in the sum", phase_text(energy.phases["idle"]), *idle))
    table = text_table(("phase", "joules, all devices", "between", "from"), rows)
    source = f'<p class="note">{escape(energy.source)}{escape(missing_text(energy.missing))}</p>'
    return f"<h2>Energy</h2>{table}{source}{lacks}{work}"


def _phase_origin(part: PhaseJoules | None) -> tuple[str, str]:
    """(spread, measured or modelled); the source itself is below the table."""
    if part is None:
        return "", ""
    return spread_text(part), ", ".join(kind for kind in ("measured", "modelled") if f"{kind}: " in part.source)


def _settings(run: Result) -> str:
    rows = [*_flat(run.config), *_flat(run.environment)]
    table = text_table(("setting", "value"), rows, "left")
    summary = "<summary>Configuration and environment</summary>"
    return f'<h2>Reproduce</h2><details class="settings">{summary}{table}</details>'


def _flat(tree: Mapping[str, Any], at: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in sorted(tree.items()):
        name = f"{at}.{key}" if at else key
        pairs += _flat(value, name) if isinstance(value, Mapping) else [(name, ABSENT if value is None else str(value))]
    return pairs


def _chart(caption: str, lines: Sequence[Line], chart: str, table: str) -> str:
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>{legend(lines)}{chart}"
        f"<details><summary>The figures as a table</summary>{table}</details></figure>"
    )
