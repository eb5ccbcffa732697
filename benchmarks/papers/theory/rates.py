"""Two rates of the papers, measured on quadratics with the product's own rules.

    python -m benchmarks.papers.theory.rates

* Acar et al. 2021, Theorem 1: PFLDyn's rounds to an error ε, against ε and the share of devices P/m.
* Fallah et al. 2020, Theorem 4.5: what Per-FedAvg's local steps τ leave of the gradient of F at the end.

Devices have strongly convex quadratics f_i(w) = ½ (w − b_i)ᵀ A_i (w − b_i) with different A_i and b_i; gradients are
exact and float64, so that only the drawing of cohorts is random. It writes rates.json, rates.png and README.md's
tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import markdown
from fleet_core.algorithms.interface import ClientState, GradFn, Payload, ServerState, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.storage import write_atomic, write_json

HERE = Path(__file__).parent
Array = np.ndarray[Any, Any]

DEVICES, SIZE, SEEDS = 40, 10, range(5)
MU, SMOOTHNESS = 0.5, 4.0
ERRORS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
ACTIVE = (40, 20, 10, 5)
STEPS, RATE, PENALTY, MOST = 20, 0.1, 1.0, 4000
MODELS = ("running mean, served", "the server's")
LOCAL, RATES, INNER, ROUNDS = (1, 2, 4, 8, 16), (0.02, 0.01), 0.05, 3000


@dataclass(frozen=True)
class Quadratics:
    """hessians [m, d, d], minima [m, d]."""

    hessians: Array
    minima: Array

    @staticmethod
    def drawn(seed: int) -> Quadratics:
        rng = np.random.default_rng(seed)
        turned = [np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0] for _ in range(DEVICES)]
        scales = rng.uniform(MU, SMOOTHNESS, (DEVICES, SIZE))
        return Quadratics(np.stack([q * s @ q.T for q, s in zip(turned, scales, strict=True)]),
                          rng.standard_normal((DEVICES, SIZE)))

    def after_a_step(self, rate: float) -> Quadratics:
        """F_i(w) = f_i(w − rate ∇f_i(w)), which is quadratic with the same minimum."""
        inner = np.eye(SIZE) - rate * self.hessians
        return Quadratics(inner @ self.hessians @ inner, self.minima)

    def gradient(self, device: int) -> GradFn:
        hessian, minimum = self.hessians[device], self.minima[device]
        return lambda at: {"body": {"w": hessian @ (at["body"]["w"] - minimum)}}

    def slope(self, w: Array) -> Array:
        """The gradient of the mean over devices."""
        found: Array = np.einsum("mij,mj->i", self.hessians, w - self.minima) / DEVICES
        return found

    def error(self, w: Array) -> float:
        """F(w) − F(w*)."""
        hessian = self.hessians.mean(0)
        best = np.linalg.solve(hessian, np.einsum("mij,mj->i", self.hessians, self.minima) / DEVICES)
        return float((w - best) @ hessian @ (w - best) / 2)


def trained(
    quadratics: Quadratics, method: str, hyper: Any, active: int, seed: int, rounds: int
) -> Iterator[ServerState]:
    """The server's state after each round."""
    row, rng = METHODS[method], np.random.default_rng([seed, 7])
    first = {"body": {"w": np.zeros(SIZE)}}
    state: ServerState = row.server.init(first, hyper)
    states: list[ClientState] = [row.client.init(first, {}, hyper) for _ in range(DEVICES)]
    for number in range(1, rounds + 1):
        sent = Payload(row.server.broadcast(state).groups, {"round": float(number)})
        updates = []
        for device in sorted(rng.permutation(DEVICES)[:active]):
            steps = [quadratics.gradient(device)] * hyper.local_steps
            made, states[device] = row.client.run(sent, states[device], steps, hyper)
            updates.append(Update(f"d{device:02}", made, 1))
        state = row.server.apply(replace(state, round=number), updates, DEVICES, hyper)
        yield state


def rounds_to_errors(active: int, seed: int) -> dict[str, dict[str, int]]:
    """Model -> error -> the first round in which it has that error; ``MOST`` if none has."""
    quadratics = Quadratics.drawn(seed)
    found = {model: dict.fromkeys(map(str, ERRORS), MOST) for model in MODELS}
    left = {model: list(ERRORS) for model in MODELS}
    hyper = METHODS["pfldyn-maml"].hyper(local_steps=STEPS, client_lr=RATE, penalty=PENALTY, clip_norm=0.0)
    for number, state in enumerate(trained(quadratics, "pfldyn-maml", hyper, active, seed, MOST), 1):
        for model, params in zip(MODELS, (state.served, state.model), strict=True):
            while left[model] and quadratics.error(params["body"]["w"]) <= left[model][0]:
                found[model][str(left[model].pop(0))] = number
        if not any(left.values()):
            break
    return found


def gradient_left(steps: int, rate: float, seed: int) -> float:
    """‖∇F‖² at the end of Per-FedAvg with all devices in every round and as many local steps in all."""
    quadratics = Quadratics.drawn(seed).after_a_step(INNER)
    hyper = METHODS["per-fedavg-exact"].hyper(local_steps=steps, client_lr=rate)
    *_, last = trained(quadratics, "per-fedavg-exact", hyper, DEVICES, seed, ROUNDS // steps)
    return float(np.square(quadratics.slope(last.model["body"]["w"])).sum())


def measured() -> dict[str, Any]:
    acar = {str(active): [rounds_to_errors(active, seed) for seed in SEEDS] for active in ACTIVE}
    fallah = {str(rate): {str(k): [gradient_left(k, rate, seed) for seed in SEEDS] for k in LOCAL} for rate in RATES}
    return {"acar": acar, "fallah": fallah}


def tables(found: dict[str, Any]) -> dict[str, str]:
    rounds = [[model, f"{DEVICES} / {active}",
               *(f"{fmean(one[model][error] for one in each):.0f}" for error in map(str, ERRORS))]
              for model in MODELS for active, each in found["acar"].items()]
    left = [[rate, *(f"{fmean(values):.1e}" for values in each.values())] for rate, each in found["fallah"].items()]
    return {"acar": markdown.table(["model", "m / P", *(f"ε = {error:g}" for error in ERRORS)], rounds),
            "fallah": markdown.table(["β", *(f"τ = {k}" for k in LOCAL)], left)}


def draw(found: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for active, each in found["acar"].items():
        left.plot(ERRORS, [fmean(one[MODELS[0]][str(error)] for one in each) for error in ERRORS], marker="o",
                  label=f"m / P = {DEVICES / int(active):g}")
    left.set(xscale="log", xlabel="error ε", ylabel="rounds", title="PFLDyn, the served model")
    for rate, values in found["fallah"].items():
        right.plot(LOCAL, [max(fmean(values[str(k)]), 1e-32) for k in LOCAL], marker="o", label=f"β = {rate}")
    right.set(xscale="log", yscale="log", xlabel="local steps τ", ylabel="‖∇F‖² at the end", title="Per-FedAvg")
    for axes in (left, right):
        axes.legend(frameon=False)
    figure.savefig(HERE / "rates.png", dpi=110)


def main() -> None:
    found = measured()
    write_json(HERE / "rates.json", found)
    draw(json.loads((HERE / "rates.json").read_text()))
    write_atomic(HERE / "README.md", markdown.filled((HERE / "README.md").read_text(), tables(found)).encode())


if __name__ == "__main__":
    main()
