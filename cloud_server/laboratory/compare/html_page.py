"""``compare.html``: a comparison as one self-contained page: curves, tables, cost to reach an accuracy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import PurePath
from typing import Any

from cloud_server.figures.charts import swatch
from cloud_server.figures.formatting import ABSENT, bytes_text, count_text, flops_text, phase_text
from cloud_server.figures.html_elements import card, cards, heading, page, row, table
from cloud_server.figures.html_style import STYLE
from cloud_server.figures.scores import ACCURACY
from cloud_server.laboratory.compare import comparison_charts
from cloud_server.laboratory.compare.comparison import (
    MACRO_F1,
    MEASURES,
    Comparison,
    Entry,
    Measure,
    Reached,
    Stat,
    number_text,
)
from cloud_server.laboratory.compare.finished_runs import DEVICES, flat
from cloud_server.laboratory.compare.tables import (
    bound_text,
    gain_text,
    kind_text,
    kinds,
    less_is_better,
    of_outputs,
    share,
    small,
    stat_text,
    target_head,
    text_of,
    under_models,
)

SCORES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("mean", "mean", share), ("worst", "worst device", share), ("best", "best device", share),
    ("variance", "variance over devices", small), ("macro_f1", "macro-F1", share),
    ("calibration_error", "calibration error", share), ("nvar", "nVAR", small),
)
OTHERS = SCORES[:3] + SCORES[4:6]
COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("rounds", "rounds", number_text), ("models", "models transmitted", number_text),
    ("fallah_rounds", "in rounds of Per-FedAvg", number_text), ("up_bytes", "payload up", bytes_text),
    ("down_bytes", "payload down", bytes_text), ("flops", "arithmetic", flops_text), ("joules", "energy", phase_text),
)
LOOK = """
main{max-width:1180px}
.charts{grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr))}
.all{margin:0 0 14px;gap:4px 22px;font-size:14px;color:var(--ink)}
.legend .swatch,th .swatch{width:36px;height:10px;flex:none;vertical-align:middle}
th .swatch{margin-right:9px}
figure svg{overflow:visible}polyline,.swatch line{stroke-linecap:butt}
.gain{display:block;font-size:12.5px;color:var(--soft);line-height:1.25}
.pm{color:var(--soft);font-weight:400}
td.top{background:var(--wash);font-weight:600}
.warning{border-left:4px solid var(--second);padding:10px 14px;background:var(--card);max-width:92ch}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;font-size:14px;margin:8px 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.table td{white-space:nowrap}tbody th{white-space:normal;min-width:17ch}
"""
NOTES = (
    ("±", "Sample standard deviation over seeds; none with one seed. The bands of the curves show the same."),
    ("accuracy", "Each device's own model on its own test samples; all devices have the same weight."),
    ("MAE in deviations", "In place of an accuracy, if models predict numbers: the mean absolute error of each number, "
     "divided by the deviation of its targets in training, averaged; less is better. MAE: in the number's own unit."),
    ("micro-F1", "In its place, if samples have several labels: the F1 of all labels' counts together."),
    ("AUROC", "In its place, if models detect anomalies: the chance that an anomaly has a higher score than a quiet "
     "sample of its device. Without labelled anomalies the difference in deviations: how badly a model repeats a quiet "
     "sample; less is better, and it does not say which anomalies are found."),
    ("variance", "Variance over devices of the accuracy, or of what is in its place; 0 if all devices have the same."),
    ("calibration error", "Expected calibration error (Guo et al. 2017) of all devices' answers together: how far the "
     "probability of the answered class is, on average, from how often such answers are right; less is better."),
    ("nVAR", "Normalized variance of the representation (Lim et al. 2024, Table 4); less is better."),
    ("by the model that they get", "Mean accuracy, or error, at the end if all methods are judged by the same kind of "
     "model: the server's; a running mean; the mean of every device's latest model (Acar et al.). Served: what a fleet "
     "with this method gives its devices."),
    ("models transmitted", "Whole models, down and up, over all devices, as Metafleet sends them."),
    ("rounds of Per-FedAvg", "Models transmitted as the papers count them (Acar et al. 2021): per device, in units of "
     "one round of Per-FedAvg, which sends one model down and one up."),
    ("payload", "Bytes of encoded models and updates; without a codec, four bytes per value."),
    ("arithmetic", "Floating-point operations of the training, counted from the shapes of the layers."),
    ("energy", "Joules of computing and sending, modelled for the board, without idle time."),
    ("cost of an accuracy", "What was spent up to the first evaluated round in which the devices' mean reaches it; not "
     "interpolated. >N: not reached after N was spent (if some seeds reach it, the mean of what all had spent)."),
    ("gain", "The baseline's cost divided by this label's cost, as in the tables of Acar et al."),
)  # fmt: skip


def render(comparison: Comparison, *, title: str) -> str:
    """The page's HTML."""
    sections = (_warnings, _cards, _curves, _scores, _others, _models, _costs, _targets, _notes, _settings)
    body = [heading(title, brief(comparison)), *filter(None, (section(comparison) for section in sections))]
    return page(title, f"{STYLE}{LOOK}{comparison_charts.css(len(comparison.entries))}", "\n".join(body))


def brief(comparison: Comparison) -> str:
    """One line that says what is compared."""
    first = comparison.entries[0]
    setting = comparison.settings[first.setting]
    seeds = max(len(entry.seeds) for entry in comparison.entries)
    parts = [_short_name(setting[part]) for part in ("data", "partition", "model")]
    parts.append(count_text(first.devices, "device"))
    return " · ".join([*(["different settings"] if comparison.mixed else parts),
                       count_text(len(comparison.entries), "label"), count_text(seeds, "seed")])


def _short_name(text: str) -> str:
    """The name in a part of a setting."""
    found = _table_of(text)
    path = found.get("path")
    names = (found.get("set"), PurePath(path).name if isinstance(path, str) else None, found.get("kind"),
             found.get("name"), found.get("data"))
    return next((name for name in names if isinstance(name, str)), text)


def _table_of(text: str) -> dict[str, Any]:
    """A part of a setting as a table; empty if it is plain text."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _setting_text(text: str) -> str:
    """A part of a setting as text, without empty values."""
    pairs = [(key, value) for key, value in flat(_table_of(text)).items() if value not in ("null", "[]", "0", "0.0")]
    return ", ".join(f"{key} = {value}" for key, value in pairs) or (ABSENT if _table_of(text) else text)



def _warnings(comparison: Comparison) -> str:
    texts = list(comparison.remarks)
    if comparison.mixed:
        texts.insert(0, f"These runs have different {', '.join(comparison.mixed)}: their figures stand side by side "
                        "and do not compare methods. The letter after a label names its setting; see the end.")
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


# Headline figures -----------------------------------------------------------------------------------------------------


def _cards(comparison: Comparison) -> str:
    if comparison.mixed:
        return ""
    extreme, measure = "Lowest" if comparison.figure.lower else "Highest", comparison.figure.name
    return cards([
        _best_card(f"{extreme} {measure}, mean over devices", comparison, DEVICES, "mean"),
        _best_card(f"{extreme} {measure} of the worst device", comparison, DEVICES, "worst"),
        *(_best_card(f"{extreme} on {kind_text(kind)}", comparison, kind, "mean") for kind in kinds(comparison)[:1]),
        _cheapest_card(comparison),
    ])


def _best_card(title: str, comparison: Comparison, kind: str, name: str) -> str:
    found = [(scores[name], e.label) for e in comparison.entries if name in (scores := e.final.get(kind, {}))]
    if not found:
        return ""
    best, label = (min if comparison.figure.lower else max)(found, key=lambda one: one[0].mean)
    return card(title, _stat(best, share), label)


def _cheapest_card(comparison: Comparison) -> str:
    """The label that reaches the highest reached target with the least payload."""
    for place in reversed(range(len(comparison.targets))):
        reached = [(entry.reached[place], entry.label) for entry in comparison.entries]
        costs = [(cost, one, label) for one, label in reached
                 if (cost := one.at.get("payload_bytes")) and cost.sign == "="]
        if costs:
            least, one, label = min(costs, key=lambda found: found[0].value)
            gain = gain_text(one.gain.get("payload_bytes"))
            under = f"{label}; {comparison.baseline} takes {gain}" if gain else label
            return card(f"Least payload {target_head(comparison, one.target)}", escape(bytes_text(least.value)), under)
    return ""



# Curves and tables ----------------------------------------------------------------------------------------------------


def _curves(comparison: Comparison) -> str:
    charts = comparison_charts.charts(comparison)
    if not charts:
        return ""
    everyone = {curve.number: curve for chart in charts for curve in chart.curves}
    figures = "".join(
        f"<figure><figcaption>{comparison_charts.what(comparison)} against {escape(chart.title)}</figcaption>"
        f"{comparison_charts.svg(chart, comparison_charts.what(comparison))}</figure>"
        for chart in charts
    )
    shown = comparison_charts.legend([everyone[number] for number in sorted(everyone)])
    legend = shown.replace("legend", "legend all", 1)
    free = any(curve.free for chart in charts for curve in chart.curves)
    note = '<p class="note">A label without cost is a level line at its last value.</p>'
    return f'<h2>Curves</h2>{legend}<div class="charts">{figures}</div>{note if free else ""}'


def _scores(comparison: Comparison) -> str:
    every = (*SCORES, *((key, title, text_of(key)) for key, title in of_outputs(comparison)))
    present = [column for column in every if any(column[0] in entry.final[DEVICES] for entry in comparison.entries)]
    rows = [
        (place, [entry.final[DEVICES].get(name) for name, _, _ in present])
        for place, entry in enumerate(comparison.entries)
    ]
    return "<h2>Devices that train, at the end</h2>" + _stats(comparison, present, rows)


def _others(comparison: Comparison) -> str:
    parts, shown = [], OTHERS if comparison.figure == ACCURACY else SCORES[:3]
    for kind in kinds(comparison):
        rows = [
            (place, [entry.final[kind].get(name) for name, _, _ in shown])
            for place, entry in enumerate(comparison.entries) if kind in entry.final
        ]
        title = kind_text(kind)
        parts.append(f"<h2>{escape(title[0].upper() + title[1:])}, at the end</h2>"
                     + _stats(comparison, shown, rows))
    return "".join(parts)


def _models(comparison: Comparison) -> str:
    parts = []
    for kind, shown in under_models(comparison):
        rows = [
            (place, [entry.final.get(key, {}).get("mean") for key, _ in shown])
            for place, entry in enumerate(comparison.entries)
        ]
        title = kind_text(kind)
        parts.append(f"<h2>{escape(title[0].upper() + title[1:])}, by the model that they get</h2>"
                     + _stats(comparison, [(key, name, share) for key, name in shown], rows))
    return "".join(parts)


def _costs(comparison: Comparison) -> str:
    present = [column for column in COSTS if any(column[0] in entry.spent for entry in comparison.entries)]
    rows = [
        (place, [entry.spent.get(key) for key, _, _ in present]) for place, entry in enumerate(comparison.entries)
    ]
    return "<h2>What the whole run cost, all devices</h2>" + _stats(comparison, present, rows, mark=False)


def _stats(
    comparison: Comparison, columns: Sequence[tuple[str, str, Callable[[float], str]]],
    rows: Sequence[tuple[int, Sequence[Stat | None]]], *, mark: bool = True,
) -> str:
    """A table of figures with the best of each column marked."""
    best: list[float | None] = []
    for k, (name, _, _) in enumerate(columns):
        values = [stat.mean for _, stats in rows if (stat := stats[k])]
        lower = less_is_better(comparison, name)
        shown = mark and not comparison.mixed and len(set(values)) > 1 and lower is not None
        best.append((min if lower else max)(values) if shown else None)
    body = [
        _row(comparison, place, [
            f'<td class="top">{_stat(stat, columns[k][2])}</td>' if stat and stat.mean == best[k]
            else f"<td>{_stat(stat, columns[k][2])}</td>" for k, stat in enumerate(stats)
        ])
        for place, stats in rows
    ]
    return table(["label", *(title for _, title, _ in columns)], body)


def _targets(comparison: Comparison) -> str:
    over = f"; below, the gain over {comparison.baseline}" if comparison.baseline else ""
    word = comparison.target_of if comparison.target_of == MACRO_F1 else comparison.figure.name
    what, parts = f"an {word}" if word[0] in "aAM" else f"a {word}", list[str]()
    for k, target in enumerate(comparison.targets):
        measured = [m for m in MEASURES if any(m.key in entry.reached[k].at for entry in comparison.entries)]
        rows = [
            _row(comparison, place, _target_cells(entry, entry.reached[k], measured))
            for place, entry in enumerate(comparison.entries)
        ]
        parts.append(f"<h2>What {what} of {target:g} costs{escape(over)}</h2>"
                     + table(["label", "seeds", *(m.title for m in measured)], rows))
    return "".join(parts)


def _target_cells(entry: Entry, reached: Reached, measured: Sequence[Measure]) -> list[str]:
    cells = [f"<td>{reached.seeds} of {len(entry.seeds)}</td>"]
    for measure in measured:
        gain = gain_text(reached.gain.get(measure.key))
        under = f'<span class="gain">{escape(gain)}</span>' if gain else ""
        cells.append(f"<td>{escape(bound_text(reached.at.get(measure.key), measure.text))}{under}</td>")
    return cells


def _row(comparison: Comparison, place: int, cells: Iterable[str]) -> str:
    """A row of a table. cells: their HTML."""
    entry = comparison.entries[place]
    letter = f' <span class="pm">{entry.setting}</span>' if comparison.mixed else ""
    return row(f"{swatch(f'c{place}', comparison_charts.SWATCH_WIDTH)}{escape(entry.label)}{letter}", cells)


def _stat(stat: Stat | None, text: Callable[[float], str]) -> str:
    if stat is None:
        return ABSENT
    figure, _, spread = stat_text(stat, text).partition(" ± ")
    return escape(figure) + (f' <span class="pm">± {escape(spread)}</span>' if spread else "")



# Notes and settings ---------------------------------------------------------------------------------------------------


def _notes(comparison: Comparison) -> str:
    return f"<h2>How to read this</h2>{_pairs(NOTES)}"


def _settings(comparison: Comparison) -> str:
    several = len(comparison.settings) > 1
    parts = [
        (f"<h3>{letter}</h3>" if several else "")
        + _pairs((part, _setting_text(text)) for part, text in setting.items())
        for letter, setting in comparison.settings.items()
    ]
    return f"<h2>Settings</h2>{''.join(parts)}"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f"<dl>{items}</dl>"
