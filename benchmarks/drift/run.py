"""How soon a device notices drift, and how often it raises a false alarm.

    METAFLEET_SHARED=FOLDER python -m benchmarks.drift.run          writes result.json and README.md's tables

Heartbeats, human activity and spoken digits. The devices of each set are divided in three: on the first the encoder is
trained (centrally, cross-entropy, the set's default network), on the second SLACK and LIMIT are chosen, and the third
are evaluated. A device makes its class means and its reference of the first 60 % of its time; the rest is its stream of
answers. Shifts are built in, from the first answer of the stream on; a device that has not noticed after 200 answers
has missed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import markdown
from fleet_core.base import storage
from fleet_core.data import model_input
from fleet_core.data.samples import Samples
from fleet_core.data.sets import spoken
from fleet_core.data.sets.set_cache import load_set
from fleet_core.data.shaping import sound
from fleet_core.learning import local_training, models
from fleet_core.personalization.drift import Reference, Sums
from fleet_core.personalization.nearest import Prototypes

HERE = Path(__file__).parent
STEPS, BATCH, RATE = 400, 64, 2e-3
SUPPORT, MOST_STREAM, WITHIN = 0.6, 1000, 200
SLACKS, LIMITS = (0.25, 0.5, 1.0, 1.5, 2.0), tuple(range(4, 401, 2))
ALLOWED = 1.0
"""False alarms in 1000 answers, over all validation devices."""
Array = np.ndarray[Any, Any]
Shift = Callable[[Array, np.random.Generator], Array]


@dataclass(frozen=True, eq=False)
class Set:
    """x float32 [N, *raw shape] in the order of time, y, device; model: of the encoder. blocks: classes follow each
    other, so that a device makes its means of the first 60 % of each. prepare: raw x -> samples."""

    x: Array
    y: Array
    device: Array
    model: str
    shares: tuple[int, int]
    blocks: bool = False
    prepare: Callable[[Array], Array] = lambda x: x


def heartbeat() -> Set:
    samples = load_set("heartbeat").train
    assert samples.client is not None
    assert samples.time is not None
    order = np.argsort(samples.time, kind="stable")
    return Set(samples.x[order], samples.y[order], samples.client[order], "cnn1d", (4, 3))


def har() -> Set:
    with np.load(_shared("har-train21.npz"), allow_pickle=False) as held:
        x, y, who = held["x"].astype(np.float32), held["y"].astype(np.int64), held["subject"].astype(str)
    return Set(x, y, who, "ds-cnn", (9, 6), blocks=True)


def spoken_digits() -> Samples:
    """The training takes of four speakers, who are the clients."""
    with np.load(_shared("spoken-digits-4speakers.npz"), allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive}
    cuts = np.split(held["audio"], held["offset"][1:-1])
    train, _ = spoken.by_take([
        (int(take), str(who), int(digit), cut)
        for take, who, digit, cut in zip(held["take"], held["speaker"], held["digit"], cuts, strict=True)
    ])
    return train


def digits() -> Set:
    train = spoken_digits()
    assert train.client is not None
    return Set(train.x[:, 0], train.y, train.client, "ds-cnn", (2, 1),
               prepare=lambda x: sound.spectrograms(np.ascontiguousarray(x), spoken.RATE_HZ))


def _shared(name: str) -> Path:
    return Path(os.environ["METAFLEET_SHARED"]) / "data" / name


SETS: Mapping[str, Callable[[], Set]] = {"heartbeat": heartbeat, "har": har, "spoken digits": digits}


def _deviation(x: Array) -> Array:
    """Standard deviation of each channel, or of the sound."""
    axes = tuple(k for k in range(x.ndim) if x.ndim == 2 or k != 1)
    return np.asarray(x.std(axis=axes, keepdims=True), np.float32)


SHIFTS: Mapping[str, Shift] = {
    "gain 2": lambda x, rng: 2 * x,
    "gain 0.5": lambda x, rng: x / 2,
    "offset": lambda x, rng: x + _deviation(x),
    "channels swapped": lambda x, rng: np.roll(x, 1, axis=1),
    "noise": lambda x, rng: x + _deviation(x) * np.asarray(rng.normal(size=x.shape), np.float32),
}
OTHER, MIX, NONE = "another device's", "one class alone", "none"


# Devices --------------------------------------------------------------------------------------------------------------


def encoder(found: Set, rows: Array) -> Callable[[Array], Array]:
    """Raw samples -> embeddings, trained on ``rows``."""
    x, y = found.prepare(found.x[rows]), found.y[rows]
    spec = model_input.standardized(x)
    layout = models.describe(found.model, spec, [str(k) for k in range(int(found.y.max()) + 1)], {})
    params = models.initial(layout, 0)
    network = models.build(layout)
    models.hold(network, {group: {n: torch.tensor(a) for n, a in named.items()} for group, named in params.items()})
    network.requires_grad_(True)
    steps = torch.optim.Adam(network.parameters(), RATE)
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        drawn = rng.integers(0, len(x), BATCH)
        loss = torch.nn.functional.cross_entropy(network(torch.tensor(x[drawn])), torch.tensor(y[drawn]))
        steps.zero_grad()
        loss.backward()
        steps.step()
    trained = {group: {name: dict(network.named_parameters())[f"core.{name}"].detach().numpy() for name in named}
               for group, named in params.items()}
    return lambda raw: local_training.embed(network, trained, found.prepare(raw))


@dataclass(frozen=True, eq=False)
class Device:
    """surprise: shift -> [n, 2] of the stream."""

    name: str
    surprise: Mapping[str, Array]


def device_of(found: Set, name: str, other: str, embed: Callable[[Array], Array]) -> Device | None:
    rows = np.flatnonzero(found.device == name)
    parts = [rows[found.y[rows] == k] for k in np.unique(found.y[rows])] if found.blocks else [rows]
    support = np.sort(np.concatenate([part[: round(SUPPORT * len(part))] for part in parts]))
    stream = np.setdiff1d(rows, support)[:MOST_STREAM]
    z, y = embed(found.x[support]), found.y[support]
    means = Prototypes.empty(int(found.y.max()) + 1, z.shape[1]).add(z, y)
    reference = Reference.of(z, y, means)
    if reference is None:
        return None
    x, rng = found.x[stream], np.random.default_rng(0)
    surprise = {NONE: reference.surprise(embed(x))}
    for shift, change in SHIFTS.items():
        if shift != "channels swapped" or x.ndim > 2:
            surprise[shift] = reference.surprise(embed(np.asarray(change(x[:WITHIN], rng), np.float32)))
    theirs = np.flatnonzero(found.device == other)[:WITHIN]
    surprise[OTHER] = reference.surprise(embed(found.x[theirs]))
    counts = np.bincount(found.y[stream])
    few = [k for k in np.flatnonzero(counts >= 20)]
    if few:
        rarest = min(few, key=lambda k: counts[k])
        surprise[MIX] = reference.surprise(embed(x[found.y[stream] == rarest][:WITHIN]))
    return Device(name, surprise)


def groups(found: Set) -> tuple[list[Device], list[Device]]:
    """(validation devices, evaluated devices)."""
    names = [str(name) for name in np.random.default_rng(0).permutation(np.unique(found.device))]
    first, second = found.shares
    embed = encoder(found, np.flatnonzero(np.isin(found.device, names[:first])))
    made = [device_of(found, name, names[(k + 1) % len(names)], embed) for k, name in enumerate(names)]
    kept = [[one for one in part if one] for part in (made[first : first + second], made[first + second :])]
    return kept[0], kept[1]


# Alarms ---------------------------------------------------------------------------------------------------------------


def false_alarms(devices: list[Device], slack: float, limit: float) -> tuple[int, int]:
    """(alarms, answers) of unchanged streams; the sums begin anew after an alarm."""
    alarms = answers = 0
    for device in devices:
        left = device.surprise[NONE]
        answers += len(left)
        while len(left):
            sums = Sums().after(left, slack, limit)
            alarms += sums.moved
            left = left[sums.moved_at :] if sums.moved else left[:0]
    return alarms, answers


def delays(devices: list[Device], shift: str, slack: float, limit: float) -> list[int | None]:
    """Answers until each device noticed; None: missed."""
    found = [Sums().after(one.surprise[shift][:WITHIN], slack, limit) for one in devices if shift in one.surprise]
    return [one.moved_at or None for one in found]


def choose(validation: Mapping[str, list[Device]]) -> tuple[float, float, list[dict[str, Any]]]:
    """(slack, limit): of each slack the lowest limit with at most ``ALLOWED`` false alarms in 1000 answers; of those
    the one that notices soonest, a miss counting as ``WITHIN``."""
    every = [one for devices in validation.values() for one in devices]
    tried = []
    for slack in SLACKS:
        for limit in LIMITS:
            alarms, answers = false_alarms(every, slack, limit)
            if 1000 * alarms <= ALLOWED * answers:
                waited = [WITHIN if one is None else one for shift in (*SHIFTS, OTHER)
                          for one in delays(every, shift, slack, limit)]
                tried.append({"slack": slack, "limit": float(limit), "false_in_1000": 1000 * alarms / answers,
                              "mean_delay": float(np.mean(waited))})
                break
    best = min(tried, key=lambda one: one["mean_delay"])
    return best["slack"], best["limit"], tried


def judged(devices: list[Device], slack: float, limit: float) -> dict[str, Any]:
    alarms, answers = false_alarms(devices, slack, limit)
    shifts = {}
    for shift in (*SHIFTS, OTHER, MIX):
        found = delays(devices, shift, slack, limit)
        if found:
            noticed = [one for one in found if one is not None]
            shifts[shift] = {"devices": len(found), "missed": len(found) - len(noticed),
                             "median_delay": float(np.median(noticed)) if noticed else None}
    return {"devices": len(devices), "false_alarms": alarms, "answers": answers, "shifts": shifts}


def main() -> None:
    torch.set_num_threads(1)
    both = {name: groups(make()) for name, make in SETS.items()}
    slack, limit, tried = choose({name: validation for name, (validation, _) in both.items()})
    result = {
        "slack": slack, "limit": limit, "tried": tried,
        "validation": {name: judged(validation, slack, limit) for name, (validation, _) in both.items()},
        "judged": {name: judged(test, slack, limit) for name, (_, test) in both.items()},
    }
    storage.write_json(HERE / "result.json", result)
    page = HERE / "README.md"
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), tables(result)), encoding="utf-8")


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    tried = [(f"{one['slack']:g}", f"{one['limit']:g}", f"{one['false_in_1000']:.2f}", f"{one['mean_delay']:.0f}")
             for one in result["tried"]]
    false = [(name, str(one["devices"]), str(one["answers"]), str(one["false_alarms"]),
              f"{1000 * one['false_alarms'] / one['answers']:.2f}") for name, one in result["judged"].items()]
    names = list(result["judged"])
    shifts = [(shift, *(noticed_text(result["judged"][name]["shifts"].get(shift)) for name in names))
              for shift in (*SHIFTS, OTHER, MIX)]
    chosen = "slack", "lowest limit", "false alarms in 1000", "mean answers until noticed"
    return {
        "choice": markdown.table(chosen, tried),
        "false": markdown.table(("set", "devices", "answers", "false alarms", "in 1000 answers"), false),
        "shifts": markdown.table(("shift", *names), shifts),
    }


def noticed_text(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "—"
    noticed = found["devices"] - found["missed"]
    return f"{noticed} of {found['devices']}" + (f", after {found['median_delay']:.0f}" if noticed else "")


if __name__ == "__main__":
    main()
