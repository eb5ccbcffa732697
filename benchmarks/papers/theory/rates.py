"""Two rates of the papers, measured with the product's own rules on quadratics and on MNIST.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.theory.rates [quadratics] [digits]

* Acar et al. 2021, Theorem 1: PFLDyn's rounds to an error ε, against ε and the share of devices P/m.
* Fallah et al. 2020, Theorem 4.5: what Per-FedAvg's local steps τ leave of the gradient of F at the end.

``quadratics``: devices have strongly convex f_i(w) = ½ (w − b_i)ᵀ A_i (w − b_i) with different A_i and b_i. ``digits``:
logistic regression, a device is a writer of MNIST (see ``digits``). Gradients are exact and float64, so that only the
drawing of devices and cohorts is random. It writes rates.json, a figure for each problem and README.md's tables. CACHE:
where ``benchmarks/papers/prepare.py mnist --cache CACHE`` has put the set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from benchmarks import markdown
from benchmarks.papers.theory.digits import Digits
from fleet_core.algorithms.interface import ClientState, GradFn, Payload, ServerState, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.storage import write_atomic, write_json

HERE = Path(__file__).parent
Array = np.ndarray[Any, Any]

DEVICES, SIZE = 40, 10
MU, SMOOTHNESS = 0.5, 4.0
ACTIVE = (40, 20, 10, 5)
STEPS, MOST = 20, 4000
MODELS = ("running mean, served", "the server's")
LOCAL, LOCAL_STEPS = (1, 2, 4, 8, 16), 3000


class Problem(Protocol):
    """Devices with smooth convex functions of float64 weights [size]."""

    @property
    def devices(self) -> int: ...

    @property
    def size(self) -> int: ...

    def after_a_step(self, rate: float) -> Problem:
        """F_i(w) = f_i(w − rate ∇f_i(w))."""

    def gradient(self, device: int) -> GradFn: ...

    def slope(self, w: Array) -> Array:
        """The gradient of the mean over devices."""

    def error(self, w: Array) -> float:
        """F(w) − F(w*)."""


@dataclass(frozen=True)
class Study:
    """drawn(seed, devices). errors: ε, falling. rate, penalty: PFLDyn's β and α, the same in all rows. rates, inner:
    Per-FedAvg's β and α. seeds, devices: of Per-FedAvg alone, whose functions of digits take long."""

    title: str
    drawn: Callable[[int, int], Problem]
    errors: tuple[float, ...]
    rate: float
    penalty: float
    rates: tuple[float, ...]
    inner: float
    seeds: int
    devices: int


@dataclass(frozen=True)
class Quadratics:
    """hessians [m, d, d], minima [m, d]."""

    hessians: Array
    minima: Array

    @staticmethod
    def drawn(seed: int, devices: int) -> Quadratics:
        rng = np.random.default_rng(seed)
        turned = [np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0] for _ in range(devices)]
        scales = rng.uniform(MU, SMOOTHNESS, (devices, SIZE))
        return Quadratics(np.stack([q * s @ q.T for q, s in zip(turned, scales, strict=True)]),
                          rng.standard_normal((devices, SIZE)))

    @property
    def devices(self) -> int:
        return len(self.minima)

    @property
    def size(self) -> int:
        return SIZE

    def after_a_step(self, rate: float) -> Quadratics:
        """F_i(w) = f_i(w − rate ∇f_i(w)), which is quadratic with the same minimum."""
        inner = np.eye(SIZE) - rate * self.hessians
        return Quadratics(inner @ self.hessians @ inner, self.minima)

    def gradient(self, device: int) -> GradFn:
        hessian, minimum = self.hessians[device], self.minima[device]
        return lambda at: {"body": {"w": hessian @ (at["body"]["w"] - minimum)}}

    def slope(self, w: Array) -> Array:
        """The gradient of the mean over devices."""
        found: Array = np.einsum("mij,mj->i", self.hessians, w - self.minima) / self.devices
        return found

    def error(self, w: Array) -> float:
        """F(w) − F(w*)."""
        hessian = self.hessians.mean(0)
        best = np.linalg.solve(hessian, np.einsum("mij,mj->i", self.hessians, self.minima) / self.devices)
        return float((w - best) @ hessian @ (w - best) / 2)


def trained(
    problem: Problem, method: str, hyper: Any, active: int, seed: int, rounds: int
) -> Iterator[ServerState]:
    """The server's state after each round."""
    row, rng = METHODS[method], np.random.default_rng([seed, 7])
    first = {"body": {"w": np.zeros(problem.size)}}
    state: ServerState = row.server.init(first, hyper)
    states: list[ClientState] = [row.client.init(first, {}, hyper) for _ in range(problem.devices)]
    for number in range(1, rounds + 1):
        sent = Payload(row.server.broadcast(state).groups, {"round": float(number)})
        updates = []
        for device in sorted(rng.permutation(problem.devices)[:active]):
            steps = [problem.gradient(device)] * hyper.local_steps
            made, states[device] = row.client.run(sent, states[device], steps, hyper)
            updates.append(Update(f"d{device:02}", made, 1))
        state = row.server.apply(replace(state, round=number), updates, problem.devices, hyper)
        yield state


STUDIES = {
    "quadratics": Study("quadratics", Quadratics.drawn, (1e-1, 1e-2, 1e-3, 1e-4, 1e-5), 0.1, 1.0, (0.02, 0.01), 0.05, 5,
                        DEVICES),
    "digits": Study("digits by writer", Digits.drawn, (1e-1, 1e-2, 1e-3, 1e-4), 0.5, 0.1, (1.0, 0.5), 0.5, 2, 20),
}
SEEDS = range(5)


def rounds_to_errors(study: Study, active: int, seed: int) -> dict[str, dict[str, int]]:
    """Model -> error -> the first round in which it has that error; ``MOST`` if none has."""
    problem = study.drawn(seed, DEVICES)
    found = {model: dict.fromkeys(map(str, study.errors), MOST) for model in MODELS}
    left = {model: list(study.errors) for model in MODELS}
    hyper = METHODS["pfldyn-maml"].hyper(local_steps=STEPS, client_lr=study.rate, penalty=study.penalty, clip_norm=0.0)
    for number, state in enumerate(trained(problem, "pfldyn-maml", hyper, active, seed, MOST), 1):
        for model, params in zip(MODELS, (state.served, state.model), strict=True):
            while left[model] and problem.error(params["body"]["w"]) <= left[model][0]:
                found[model][str(left[model].pop(0))] = number
        if not any(left.values()):
            break
    return found


def gradient_left(study: Study, steps: int, rate: float, seed: int) -> float:
    """‖∇F‖² at the end of Per-FedAvg with all devices in every round and ``LOCAL_STEPS`` steps in all."""
    problem = study.drawn(seed, study.devices).after_a_step(study.inner)
    hyper = METHODS["per-fedavg-exact"].hyper(local_steps=steps, client_lr=rate)
    *_, last = trained(problem, "per-fedavg-exact", hyper, study.devices, seed, LOCAL_STEPS // steps)
    return float(np.square(problem.slope(last.model["body"]["w"])).sum())


def measured(study: Study) -> dict[str, Any]:
    acar = {str(active): [rounds_to_errors(study, active, seed) for seed in SEEDS] for active in ACTIVE}
    fallah = {str(rate): {str(k): [gradient_left(study, k, rate, seed) for seed in range(study.seeds)] for k in LOCAL}
              for rate in study.rates}
    return {"acar": acar, "fallah": fallah}


def tables(name: str, found: dict[str, Any]) -> dict[str, str]:
    errors, rates = STUDIES[name].errors, STUDIES[name].rates
    rounds = [[model, f"{DEVICES} / {active}",
               *(f"{fmean(one[model][str(error)] for one in found['acar'][str(active)]):.0f}" for error in errors)]
              for model in MODELS for active in ACTIVE]
    left = [[str(rate), *(f"{fmean(found['fallah'][str(rate)][str(k)]):.1e}" for k in LOCAL)] for rate in rates]
    return {f"acar-{name}": markdown.table(["model", "m / P", *(f"ε = {error:g}" for error in errors)], rounds),
            f"fallah-{name}": markdown.table(["β", *(f"τ = {k}" for k in LOCAL)], left)}


def draw(name: str, found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    study = STUDIES[name]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for active in ACTIVE:
        each = found["acar"][str(active)]
        left.plot(study.errors, [fmean(one[MODELS[0]][str(error)] for one in each) for error in study.errors],
                  marker="o", label=f"m / P = {DEVICES / active:g}")
    left.set(xscale="log", xlabel="error ε", ylabel="rounds", title=f"PFLDyn on {study.title}, the served model")
    for rate in study.rates:
        values = found["fallah"][str(rate)]
        right.plot(LOCAL, [max(fmean(values[str(k)]), 1e-32) for k in LOCAL], marker="o", label=f"β = {rate}")
    right.set(xscale="log", yscale="log", xlabel="local steps τ", ylabel="‖∇F‖² at the end",
              title=f"Per-FedAvg on {study.title}")
    for axes in (left, right):
        axes.legend(frameon=False)
    figure.savefig(HERE / f"{name}.png", dpi=110)


def main(names: Sequence[str]) -> None:
    path, page = HERE / "rates.json", HERE / "README.md"
    for name in names or STUDIES:
        known = json.loads(path.read_text()) if path.exists() else {}
        write_json(path, {**known, name: measured(STUDIES[name])})
    every: dict[str, str] = {}
    for name, found in json.loads(path.read_text()).items():
        draw(name, found)
        every |= tables(name, found)
    write_atomic(page, markdown.filled(page.read_text(), every).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
