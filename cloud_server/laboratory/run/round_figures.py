"""The figures of a run's rounds: costs, and scores of the devices' models.

N: classes. M: answers. D: width of the representation.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_server.figures.scores import compared, f1_by_class
from cloud_server.laboratory.run.device_work import TEST_STEP, DeviceEvaluation, TrainedDevice
from fleet_core.algorithms.interface import Method
from fleet_core.base import schema
from fleet_core.base.error_bounds import Spread
from fleet_core.power.energy_model import STATED
from fleet_core.power.radio import NO_RADIO, RadioModel
from fleet_core.tasks import calibration
from fleet_core.tasks.task import Task, together

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Costs:
    """Joules per FLOP and per byte on a board, from the constants in its profile. j_per_flop: None if the profile cites
    none. source, spread: those of the constant for computing; source is empty without a board. Idle time is not
    included, because a simulation has no device time."""

    j_per_flop: float | None = None
    radio: RadioModel = NO_RADIO
    source: str = ""
    spread: Spread = STATED

    def joules(self, flops: float | None, up_bytes: float, down_bytes: float) -> dict[str, Any] | None:
        """Modelled joules of computing and sending: value, low, high, source. None if a constant or the FLOPs are
        unknown."""
        sent_j = self.radio.joules(up_bytes, down_bytes)
        if self.j_per_flop is None or sent_j is None or flops is None:
            return None
        work_j, radio = self.j_per_flop * flops, self.radio
        return {
            "value": work_j + sent_j,
            "low": work_j * self.spread.low + sent_j * radio.spread.low,
            "high": work_j * self.spread.high + sent_j * radio.spread.high,
            "source": f"{self.source}; radio: {radio.source}" + (f", {radio.absent}" if radio.absent else ""),
        }


class Spent:
    """The bytes and joules that a run has spent so far."""

    def __init__(self) -> None:
        self.payload_bytes = 0.0
        self.joules = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        self.payload_bytes += sum(row["payload_bytes"].values())
        self.joules += row.get("energy_j", {}).get("value", 0.0)

    def reaches(self, payload_bytes: float, joules: float) -> bool:
        """Whether one of the limits is reached; 0 means no limit."""
        return bool(payload_bytes and self.payload_bytes >= payload_bytes) or bool(joules and self.joules >= joules)


def of_round(
    number: int, method: Method, learned: Sequence[TrainedDevice], down_bytes: int, costs: Costs
) -> dict[str, Any]:
    """A round's figures without its evaluation; missing ones are left out. down_bytes: bytes to all devices."""
    counted = [one for one in learned if not one.error]
    sent = [one for one in counted if one.averaged]
    skipped = sum(one.skipped for one in sent)
    paper = method.paper_models or (method.models_down, method.models_up)
    up = sum(one.payload_bytes for one in learned if one.averaged)  # a refused update was sent too
    row: dict[str, Any] = {
        "round": number,
        "loss": statistics.fmean(one.loss for one in counted),
        "participants": len(counted),
        "refused": len(learned) - len(counted),
        "models_transmitted": float(len(counted) * method.models_down + (len(sent) - skipped) * method.models_up),
        "models_transmitted_paper": float(len(counted) * paper[0] + (len(sent) - skipped) * paper[1]),
        "payload_bytes": {"up": up, "down": down_bytes},
    }
    worked = [one for one in learned if not one.error or one.flops is not None]  # a refused update was computed too
    if worked and all(one.flops is not None for one in worked):
        row["flops"] = float(sum(one.flops or 0 for one in worked))
    energy = costs.joules(row.get("flops"), up, down_bytes)
    if energy is not None:
        row["energy_j"] = energy
    row |= {"skipped": skipped} if skipped else {}
    errors = {one.client: one.error for one in learned if one.error}
    return row | ({"errors": errors} if errors else {})


def evaluated(evaluations: Iterable[DeviceEvaluation], task: Task | None = None) -> dict[str, Any]:
    """The figures of a round's evaluation: accuracy over devices and pooled, macro-F1 and calibration error of all
    answers together, variance, nVAR; likewise with a gradient step at test, for new devices by support share, and for
    novel classes. task: of a model without classes, with the figures of the task and ``measures`` in place of accuracy,
    macro-F1 and calibration error."""
    of: dict[tuple[str, float], list[DeviceEvaluation]] = {}
    for evaluated in evaluations:
        of.setdefault((evaluated.kind, evaluated.support), []).append(evaluated)
    row: dict[str, Any] = {}
    for (kind, support), found in of.items():
        sound = [evaluated for evaluated in found if not evaluated.error]
        wrong = {evaluated.client: evaluated.error for evaluated in found if evaluated.error}
        summary: dict[str, Any] = {}
        if sound:
            summary = _summary(sound) if task is None else _of_task(sound, task)
        summary |= {"not_evaluated": wrong} if wrong else {}
        if kind == "train":
            row |= summary
            row |= {"nvar": value} if task is None and (value := nvar(sound)) is not None else {}
        elif kind == "new":
            row.setdefault("new_devices", {})[f"{support:g}"] = summary
        elif kind == TEST_STEP:
            row["test_step"] = {key: value for key, value in summary.items() if key != "before"}
        else:
            row["novel_classes"] = summary
    return row


def _summary(evaluations: Sequence[DeviceEvaluation]) -> dict[str, Any]:
    by_device = {v.client: float(np.trace(v.confusion) / v.confusion.sum()) for v in evaluations}
    values, pooled = np.array(list(by_device.values())), np.sum([v.confusion for v in evaluations], axis=0)
    summary: dict[str, Any] = {
        "accuracy": {"mean": float(values.mean()), "worst": float(values.min()), "best": float(values.max()),
                     "variance": float(values.var()), "pooled": float(np.trace(pooled) / pooled.sum())},
        "macro_f1": macro_f1(pooled),
        "devices": by_device,
    }
    error = calibration.pooled([v.gaps for v in evaluations], int(pooled.sum()))
    summary |= {} if error is None else {"calibration_error": error}
    if all(v.before is not None for v in evaluations):
        plain = [v.before for v in evaluations if v.before is not None]
        together = np.sum(plain, axis=0)
        mean = float(np.mean([np.trace(one) / one.sum() for one in plain]))
        pooled_accuracy = float(np.trace(together) / together.sum())
        summary["before"] = {"accuracy": {"mean": mean, "pooled": pooled_accuracy}, "macro_f1": macro_f1(together)}
    return summary


def _of_task(evaluations: Sequence[DeviceEvaluation], task: Task) -> dict[str, Any]:
    """Each figure of the task's ``COMPARED`` that is known: its mean, worst and best over the devices that have one.
    ``measures``: the task's measures over all samples. ``devices``: the first of the figures."""
    every = {v.client: v.measured for v in evaluations if v.measured is not None}
    plain = [v.measured_before for v in evaluations if v.measured_before is not None]
    known = compared(task, list(every.values()))
    first = next(iter(known))
    summary = {
        "measures": together(task, list(every.values())).figures,
        **{key: schema.plain(spread) for key, spread in known.items()},
        "devices": {client: one.compared[first] for client, one in every.items() if first in one.compared},
    }
    if len(plain) == len(every):
        before = compared(task, plain)
        summary["before"] = {
            "measures": together(task, plain).figures,
            **{key: {"mean": before[key].mean, "pooled": before[key].pooled} for key in known},
        }
    return summary


def macro_f1(confusion_NM: Array) -> float:
    """Mean F1 over the classes that occur. M: N, or N + 1 with a column for answers that are no class."""
    return float(f1_by_class(confusion_NM)[confusion_NM.sum(1) > 0].mean())


def nvar(evaluations: Sequence[DeviceEvaluation]) -> float | None:
    """Normalized variance of the representation (Lim et al. 2024, Table 4): over classes k, the mean squared distance
    of the class's test samples to their mean c_k, divided by that of c_k to the nearest other class mean. None if
    there are fewer than two classes or no representation."""
    taken = [v.moments for v in evaluations if v.moments is not None]
    if not taken:
        return None
    count_N = np.sum([m.count for m in taken], axis=0)
    here = count_N > 0
    if here.sum() < 2:
        return None
    mean_ND = np.sum([m.total for m in taken], axis=0)[here] / count_N[here, None]
    spread_N = np.sum([m.squares for m in taken], axis=0)[here] / count_N[here] - np.square(mean_ND).sum(1)
    apart_NN = np.square(mean_ND[:, None] - mean_ND).sum(2)
    np.fill_diagonal(apart_NN, np.inf)
    nearest_N = apart_NN.min(1)
    return float(np.mean(spread_N / nearest_N)) if (nearest_N > 0).all() else None
