"""The aggregator's loop gives memory back, also in a fleet that never pauses."""

from types import SimpleNamespace
from typing import Any

import pytest

from cloud_server.running import aggregator_process
from fleet_core.board import allocator


@pytest.mark.parametrize(("rounds_a_step", "returned"), [(1, [20, 40]), (3, [21, 42]), (0, [])])
def test_a_fleet_without_a_pause_gives_memory_back_every_twenty_rounds(
    monkeypatch: pytest.MonkeyPatch, rounds_a_step: int, returned: list[int]
) -> None:
    closed = SimpleNamespace(round=0)
    found = list[int]()

    def step(timeout_s: float) -> bool:
        closed.round += rounds_a_step
        return True

    monkeypatch.setattr(allocator, "trim", lambda: found.append(closed.round))
    aggregator: Any = SimpleNamespace(step=step, coordinator=SimpleNamespace(checkpoint=closed, finished=False))
    stops = iter([False] * 50 * 2)  # it is asked twice a step
    aggregator_process._step_until_stopped(
        aggregator, None, lambda: next(stops, True) or closed.round > 59, lambda log: None, False, print, lambda: None,
    )
    assert found == returned
