"""Evaluations in the ledger: what devices report of served models, and their accuracies or measures by round."""

from __future__ import annotations

from cloud_server.figures.scores import confusion_accuracy, macro_f1
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Alone, Evaluation, TaskEvaluation
from fleet_core.protocol.device_messages import Report
from fleet_core.tasks.task import Task


def record(ledger: Ledger, device: str, report: Report, task: Task | None = None) -> None:
    """Writes the evaluations of a report, if it has any; evaluations without samples are left out. task: of a fleet
    without classes."""
    if report.evaluated_round is None:
        return
    for one in report.evaluations:
        if task is not None and one.sums is not None:
            ledger.put(TaskEvaluation(
                round=report.evaluated_round, device=device, stage=one.stage, method=one.method, task=task.kind,
                outputs=task.outputs, samples=one.samples, sums=one.sums, new=report.new,
            ))
            continue
        accuracy, score = confusion_accuracy(one.confusion), macro_f1(one.confusion, classes_present_only=True)
        if accuracy is not None and score is not None:
            ledger.put(Evaluation(
                round=report.evaluated_round, device=device, stage=one.stage, method=one.method,
                confusion=one.confusion, accuracy=accuracy, macro_f1=score, new=report.new, gaps=one.gaps,
            ))
    if (alone := report.alone) is not None:
        ledger.put(Alone(
            round=report.evaluated_round, device=device, frequent=alone.frequent, method=alone.method,
            confusion=alone.confusion,
        ))


def evaluated(ledger: Ledger, number: int) -> set[str]:
    """The devices that have evaluated the model of round ``number``."""
    return ({row.device for row in ledger.rows(Evaluation, round=number)}
            | {row.device for row in ledger.rows(TaskEvaluation, round=number)})


def accuracies(ledger: Ledger, within: range) -> dict[int, dict[str, float]]:
    """Round -> accuracy of each device that trains, after personalization if it has personalized."""
    found: dict[int, dict[str, float]] = {}
    for number, device, stage, new, accuracy in ledger.accuracies(within):
        if not new and (stage == "after" or device not in found.get(number, {})):
            found.setdefault(number, {})[device] = accuracy
    return found
