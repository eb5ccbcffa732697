"""Two rates of the papers, measured with the product's own rules on quadratics and on MNIST.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.theory.rates [--studies quadratics digits]
        [--parts acar fallah remarks]

* ``acar``: Acar et al. 2021, Theorem 1: PFLDyn's rounds to an error ε, against ε and the share of devices P/m.
* ``fallah``: Fallah et al. 2020, Theorem 4.5: what Per-FedAvg's local steps τ leave of the gradient of F at the end.
* ``remarks``: their Remarks 4.7 and 4.8: the mean of the devices' models after t_k of the τ local steps, t_k drawn at
  random, and rates β that fall from round to round.

``quadratics``: devices have strongly convex f_i(w) = ½ (w − b_i)ᵀ A_i (w − b_i) with different A_i and b_i. ``digits``:
logistic regression, a device is a writer of MNIST (see ``digits``). Gradients are exact and float64, so that only the
drawing of devices and cohorts is random. It writes rates.json, a figure for each problem and README.md's tables; parts
that are not named stay. CACHE: where ``benchmarks/papers/prepare.py mnist --cache CACHE`` has put the set.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from benchmarks import markdown
from benchmarks.papers.theory.digits import Digits
from fleet_core.algorithms.interface import ClientState, GradFn, Method, Payload, ServerState, Update
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
REMARKS = ("the server's, β", "after t_k steps, β", "the server's, β / √k")


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
    problem: Problem, method: str, hyper: Any, active: int, seed: int, rounds: int,
    rate: Callable[[int], float] | None = None,
) -> Iterator[ServerState]:
    """The server's state after each round. rate: β of each round; None: hyper's."""
    row, rng = METHODS[method], np.random.default_rng([seed, 7])
    first = {"body": {"w": np.zeros(problem.size)}}
    state: ServerState = row.server.init(first, hyper)
    states: list[ClientState] = [row.client.init(first, {}, hyper) for _ in range(problem.devices)]
    for number in range(1, rounds + 1):
        now = hyper if rate is None else replace(hyper, client_lr=rate(number))
        state = one_round(problem, row, state, states, rng.permutation(problem.devices)[:active], now)
        yield state


def one_round(
    problem: Problem, row: Method, state: ServerState, states: list[ClientState], active: Array, hyper: Any
) -> ServerState:
    """The server's state after one more round; ``states`` get those of the active devices."""
    number = state.round + 1
    sent = Payload(row.server.broadcast(state).groups, {"round": float(number)})
    updates = []
    for device in sorted(active):
        steps = [problem.gradient(device)] * hyper.local_steps
        made, states[device] = row.client.run(sent, states[device], steps, hyper)
        updates.append(Update(f"d{device:02}", made, 1))
    return row.server.apply(replace(state, round=number), updates, problem.devices, hyper)


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
    return _left(problem, last)


def gradient_by_remark(study: Study, steps: int, seed: int) -> dict[str, float]:
    """‖∇F‖² at the end, as in ``gradient_left`` with the first of the rates, by ``REMARKS``."""
    problem, method = study.drawn(seed, study.devices).after_a_step(study.inner), "per-fedavg-exact"
    row, beta, rounds = METHODS[method], study.rates[0], LOCAL_STEPS // steps
    hyper = row.hyper(local_steps=steps, client_lr=beta)
    *_, last = trained(problem, method, hyper, study.devices, seed, rounds)
    *_, falling = trained(problem, method, hyper, study.devices, seed, rounds, lambda k: beta / math.sqrt(k))
    states: list[ClientState] = [row.client.init(last.model, {}, hyper) for _ in range(problem.devices)]
    means = [last] + [one_round(problem, row, last, states, np.arange(study.devices), replace(hyper, local_steps=t))
                      for t in range(1, steps)]
    slopes = [_left(problem, state) for state in means]
    return dict(zip(REMARKS, (slopes[0], fmean(slopes), _left(problem, falling)), strict=True))


def _left(problem: Problem, state: ServerState) -> float:
    return float(np.square(problem.slope(state.model["body"]["w"])).sum())


def of_acar(study: Study) -> Any:
    return {str(active): [rounds_to_errors(study, active, seed) for seed in SEEDS] for active in ACTIVE}


def of_fallah(study: Study) -> Any:
    return {str(rate): {str(k): [gradient_left(study, k, rate, seed) for seed in range(study.seeds)] for k in LOCAL}
            for rate in study.rates}


def of_remarks(study: Study) -> Any:
    return {str(k): [gradient_by_remark(study, k, seed) for seed in range(study.seeds)] for k in LOCAL}


PARTS: dict[str, Callable[[Study], Any]] = {"acar": of_acar, "fallah": of_fallah, "remarks": of_remarks}


def tables(name: str, found: dict[str, Any]) -> dict[str, str]:
    errors, rates = STUDIES[name].errors, STUDIES[name].rates
    rounds = [[model, f"{DEVICES} / {active}",
               *(f"{fmean(one[model][str(error)] for one in found['acar'][str(active)]):.0f}" for error in errors)]
              for model in MODELS for active in ACTIVE]
    left = [[str(rate), *(f"{fmean(found['fallah'][str(rate)][str(k)]):.1e}" for k in LOCAL)] for rate in rates]
    remarks = [[remark, *(f"{fmean(one[remark] for one in found['remarks'][str(k)]):.1e}" for k in LOCAL)]
               for remark in REMARKS]
    return {f"acar-{name}": markdown.table(["model", "m / P", *(f"ε = {error:g}" for error in errors)], rounds),
            f"fallah-{name}": markdown.table(["β", *(f"τ = {k}" for k in LOCAL)], left),
            f"remarks-{name}": markdown.table(["model, rate", *(f"τ = {k}" for k in LOCAL)], remarks)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    path, page = HERE / "rates.json", HERE / "README.md"
    for name in options.studies:
        for part in options.parts:
            known = json.loads(path.read_text()) if path.exists() else {}
            made = PARTS[part](STUDIES[name])
            write_json(path, {**known, name: {**known.get(name, {}), part: made}})
    every: dict[str, str] = {}
    for name, found in json.loads(path.read_text()).items():
        draw(name, found)
        every |= tables(name, found)
    write_atomic(page, markdown.filled(page.read_text(), every).encode())


if __name__ == "__main__":
    main()
