"""What a codec saves and what it costs: bytes and macro-F1 of a method on the heartbeats, for every codec.

The ten patients of the built-in set train cnn1d for 30 rounds in the laboratory, with three seeds. Macro-F1 is measured
on a validation part inside each patient's training part; the usual test samples are not used. Bytes a round are those
of a device, up and down, from round 2 on; what a codec leaves out is computed as in ``choose_codec.Past``.

    python benchmarks/cost/codecs.py --runs FOLDER [--data heartbeat] [--method pfldyn-proto] [--seeds 3]
        [--minutes 15] [--jobs 1] [CODEC ...]

CODEC is one for both ways, or UP/DOWN. The ladder and the limits of ``auto`` were chosen with ``--data har`` and
``--data mnist``: ten devices, 20 rounds, one or two seeds, validation parts too. Runs that have ended in FOLDER are
kept, so that the same command goes on. After each codec it writes result.json and the table in README.md, beside this
file; other rows stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import markdown
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run import simulate as simulation
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.run_folder import Store
from fleet_core.base import processes, storage
from fleet_core.base.errors import RoundError
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model.choose_codec import AUTO, WAYS, mean_of_known

HERE = Path(__file__).parent
METHOD = "pfldyn-proto"
FIRST = ("fp32", "int8", "auto", "topk-10", "topk-1", "int4", "ternary", "lowrank", "topk-01", "mask")
"""Codecs in the order in which they are run; the others follow."""


@dataclass(frozen=True)
class Setting:
    """Which devices train, and how long. seeds: how many. tables: of the experiment."""

    seeds: int
    rounds: int
    tables: Mapping[str, Any]


BY_TIME = {"split": "time", "train_fraction": 0.6}
HEARTBEAT = "heartbeat"
SETTINGS = {
    HEARTBEAT: Setting(3, 30, {
        "data": {"set": "heartbeat"}, "partition": {"kind": "natural", "options": BY_TIME}, "model": {"name": "cnn1d"},
    }),
    "har": Setting(1, 20, {
        "data": {"set": "har"}, "partition": {"kind": "natural", "options": {**BY_TIME, "max_clients": 10}},
        "model": {"name": "cnn1d"},
    }),
    "mnist": Setting(1, 20, {
        "data": {"set": "mnist", "limit": 3000},
        "partition": {"kind": "dirichlet", "options": {"devices": 10, "concentration": 0.5, "train_fraction": 0.8}},
        "model": {"name": "mlp", "options": {"hidden": [80, 60]}},
    }),
}


def experiment(codec: str, method: str = METHOD, data: str = HEARTBEAT, seeds: int = 0) -> experiments.Experiment:
    """seeds: how many, 0 for as many as the set has."""
    up, _, down = codec.partition("/")
    setting = SETTINGS[data]
    return experiments.read({
        **setting.tables, "seeds": list(range(seeds or setting.seeds)), "codec_up": up, "codec_down": down or up,
        "budget": {"rounds": setting.rounds}, "evaluation": {"every": 0, "within_training": True},
        "method": [{"name": method}],
    })


def row(data: str, method: str, codec: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Figures of the runs that have ended: macro-F1 by seed, and means over the rounds after the first of one device's
    bytes and of what was left out."""
    ended = [Store(folder).result() for folder in folders if Store(folder).done]
    later = [one for result in ended for one in result["rounds"][1:]]
    sent = {
        way: mean(one["payload_bytes"][way] / one["participants"] for one in later) if later else None
        for way in WAYS
    }
    left = {way: mean_of_known(one["codecs"][way]["left"] for one in later) for way in WAYS}
    found = {"data": data, "method": method, "codec": codec,
             "macro_f1": [result["evaluated"]["macro_f1"] for result in ended], "bytes": sent, "left": left,
             "failed": len(folders) - len(ended)}
    return found | ({"rounds": rounds_by_codec(later)} if codec == AUTO else {})


def rounds_by_codec(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Way -> codec -> number of rounds."""
    return {way: dict(Counter(one["codecs"][way]["codec"] for one in rounds)) for way in WAYS}


def compute(
    runs: Path, minutes: float, jobs: int, codecs: Sequence[str] = (), method: str = METHOD, data: str = HEARTBEAT,
    seeds: int = 0,
) -> list[dict[str, Any]]:
    """A row per codec, as many as the time allows; the last one begun is completed. codecs: only these."""
    rows, until = [], time.monotonic() + 60 * minutes
    for codec in codecs or dict.fromkeys((*FIRST, *CODECS)):
        out, asked = runs / data / method / codec.replace("/", "-"), experiment(codec, method, data, seeds)
        folders = [out / run.name for run in experiments.runs(asked)]
        if not all(Store(folder).done for folder in folders):
            if time.monotonic() > until:
                continue
            try:
                simulation.simulate(asked, out, simulation.Options("local", jobs, "cpu"))
            except RoundError as error:
                processes.say(str(error))
        rows.append(row(data, method, codec, folders))
        processes.say(json.dumps(rows[-1]))
        write(rows)
    return rows


def write(rows: Sequence[dict[str, Any]], folder: Path = HERE) -> None:
    """result.json and the tables of README.md, by set, method and in the order of ``metafleet codecs``; rows that are
    there already and not in ``rows`` stay."""
    path = folder / "result.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    named = {(one["data"], one["method"], one["codec"]): one for one in (*kept, *rows)}
    sets, order = tuple(SETTINGS), (*CODECS, AUTO)
    rows = sorted(named.values(), key=lambda one: (sets.index(one["data"]), one["method"],
                                                   order.index(one["codec"].partition("/")[0])))
    rounds = {name: one.rounds for name, one in SETTINGS.items()}
    storage.write_json(path, {"rounds": rounds, "rows": rows})
    page = folder / "README.md"
    of = {"codecs": table([one for one in rows if one["data"] == HEARTBEAT], ("method", "codec")),
          "chosen": table([one for one in rows if one["data"] != HEARTBEAT], ("data", "codec"))}
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), of), encoding="utf-8")


def table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    heads = (*keys, "bytes up", "bytes down", "left out up", "down", "macro-F1", "spread", "seeds")
    return markdown.table(heads, (line(one, keys) for one in rows))


def line(one: dict[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    figures, sent, left = one["macro_f1"], one["bytes"], one.get("left", {})
    return (
        *(f"`{one[key]}`" for key in keys), *(f"{sent[way]:,.0f}" if sent[way] else "-" for way in WAYS),
        *(f"{left[way]:.2f}" if left.get(way) is not None else "-" for way in WAYS),
        f"{mean(figures):.3f}" if figures else "diverged", f"{stdev(figures):.3f}" if len(figures) > 1 else "-",
        str(len(figures)) + (f", {one['failed']} diverged" if one["failed"] else ""),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--data", default=HEARTBEAT, choices=SETTINGS)
    parser.add_argument("--method", default=METHOD)
    parser.add_argument("--seeds", type=int, default=0, help="default: 3 with the heartbeats, 1 with the others")
    parser.add_argument("--minutes", type=float, default=15.0, help="no new codec is begun after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("codecs", nargs="*", metavar="CODEC", help="default: all")
    options = parser.parse_args()
    try:
        compute(options.runs, options.minutes, options.jobs, options.codecs, options.method, options.data,
                options.seeds)
    except Stopped:
        processes.say("stopped; the same command goes on")


if __name__ == "__main__":
    main()
