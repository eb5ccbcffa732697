"""What must hold in a fleet of ``tests.support.inprocess.World``: rounds, evaluations, duals, checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np

from cloud_server.ledger.ledger_tables import Evaluation, Update
from edge_agent.device.state import DeviceState
from fleet_core.base import storage, trees
from tests.support.inprocess import World, toy

TWO_ROUNDS: dict[str, Any] = {
    "rounds": 2, "devices": 2, "hyper": "support_batch = 8\nquery_batch = 8", "link": "chunk_bytes = 1024",
    "fleet": "quorum = 1.0",
}
"""Arguments of ``config_text``: two rounds of two devices in which every update must be counted."""


def start(w: World, *names: str, shift: float = 0.0) -> None:
    w.start_server()
    for n, name in enumerate(names):
        w.start_agent(name, toy(n, shift=shift * n))


def opened(w: World, number: int) -> bool:
    return w.server is not None and w.server.open is not None and w.server.open.number == number


def all_evaluated(w: World, number: int) -> bool:
    return {j.device for j in w.server.ledger.rows(Evaluation, round=number)} >= set(w.agents)


def finished(w: World) -> bool:
    return w.server is not None and w.server.finished and all_evaluated(w, w.closed())


def statuses(w: World, number: int) -> dict[str, str]:
    return {u.device: u.status for u in w.server.ledger.rows(Update, round=number)}


def state_key(w: World, epoch: int) -> str:
    return f"{w.name}.{w.server.method.name}-v{w.server.method.version}-{w.server.layout.hash}-e{epoch}"


def devices_dual(w: World, feedback: bool) -> trees.Params | None:
    """Σ g_i (+ α Σ e_i) over the enrolled devices, from their disks; None if none has committed. feedback: every one
    has an e_i; others have one where they skipped."""
    penalty, total = w.server.hyper.penalty, None
    for name in w.server._members.members():
        state = DeviceState(w.folder / "devices" / name).state(state_key(w, w.server.checkpoint.state.dual_epoch))
        if state is None:
            continue
        mine = trees.apply(lambda a: a.astype(np.float64), state["dual"])
        if feedback or "residual" in state:
            mine = trees.merged(mine, trees.axpy(penalty, state["residual"], mine))
        total = mine if total is None else trees.add(total, mine)
    return total


def settled(w: World) -> bool:
    """No device has a pending update of a closed round."""
    return all(a._updates.pending is None or a._updates.pending.round > w.closed() for a in w.agents.values())


def check_duals(w: World, feedback: bool) -> None:
    facts, state = w.server.checkpoint.facts, w.server.checkpoint.state
    server = trees.scale(state.memory["dual"], int(facts["members"]))
    devices = devices_dual(w, feedback)
    if devices is None:
        return assert_close(server, trees.zeros_like(server), 1e-12)
    assert_close(server, devices, 3e-6 * max(1.0, trees.norm(devices)))


def assert_close(left: trees.Params, right: trees.Params, limit: float) -> None:
    assert trees.norm(trees.subtract(left, right)) <= limit


def checkpoint_bits(w: World) -> dict[str, bytes]:
    """The last checkpoint, bit for bit."""
    state = w.server.checkpoint.state
    roles = {"model": state.model, "evaluated": state.served, **state.memory}
    return {key: np.asarray(a).tobytes() for key, a in storage.flatten_roles(roles).items()}


def check_two_rounds(w: World, wanted: dict[str, bytes], where: str) -> None:
    """Both updates of both rounds were counted once, and the fleet ended as ``checkpoint_bits`` ``wanted``."""
    assert checkpoint_bits(w) == wanted, where
    check_duals(w, feedback=True)
    counted = [(u.round, u.device, u.status) for u in w.server.ledger.rows(Update)]
    assert counted == [(n, d, "counted") for n in (1, 2) for d in ("d0", "d1")], where
    assert all_evaluated(w, 2), where
