"""How far PFLDyn's served model, a running mean, is from what Acar et al. evaluate: the mean of all latest device
models.

    python benchmarks/served_model.py [--active 4 --rounds 30 --seed 0]

The eight patients of the heartbeat set as devices, in one process. Every five rounds it prints the distance of the two
models relative to the distance of the mean from the first weights, and for both models the accuracy and macro-F1 of
class means on the pooled later 40 % of every patient. With --active 8 the two are the same.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import ClientState, Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.data import heartbeat
from fleet_core.data.samples import Samples
from fleet_core.data.time_split import by_time
from fleet_core.learning import local_training, models
from fleet_core.model.layout import InputSpec
from fleet_core.personalization.nearest import Prototypes

METHOD = METHODS["pfldyn-proto"]
NETWORK = models.build(LAYOUT := models.describe("cnn1d", InputSpec((3, 128)), heartbeat.CLASSES, {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--active", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    beats = heartbeat.load_heartbeat()
    parts = {name: by_time(beats.of_client(name)) for name in heartbeat.DEVICES}
    print(f"{'round':>5} {'distance':>9}   running mean: accuracy, F1   mean of latest: accuracy, F1")
    compare(parts, options.active, options.rounds, options.seed)


def compare(parts: dict[str, tuple[Samples, Samples]], active: int, rounds: int, seed: int) -> None:
    hyper, rng = METHOD.hyper(), np.random.default_rng(seed)
    first = METHOD.params(wide(models.initial(LAYOUT, seed)))
    state = METHOD.server.init(first, hyper)
    own: dict[str, ClientState] = {name: {} for name in parts}
    latest: dict[str, Params] = dict.fromkeys(parts, first)
    for number in range(1, rounds + 1):
        updates = []
        anchor = trees.apply(lambda a: a.astype(np.float32), state.model)
        broadcast = Payload(anchor, {"round": float(number)})
        for name in aggregation.order(str(n) for n in rng.choice(sorted(parts), active, replace=False)):
            data = parts[name][0]
            result = local_training.train_round(
                METHOD, NETWORK, LAYOUT, broadcast, own[name], data.x, data.y, hyper, np.random.default_rng(rng)
            )
            own[name] = result.pending
            updates.append(Update(name, Payload(wide(result.update.groups))))
            latest[name] = trees.add(state.model, updates[-1].payload.groups)
        state = METHOD.server.apply(state, updates, len(parts), hyper)
        if number % 5 == 0:
            total: Params = trees.zeros_like(first)
            for model in latest.values():
                total = trees.axpy(1 / len(latest), model, total)
            gap = trees.norm(trees.subtract(state.served, total)) / trees.norm(trees.subtract(total, first))
            (a, f), (b, g) = evaluate(parts, state.served), evaluate(parts, total)
            print(f"{number:>5} {gap:>9.1e}   {a:>22.4f}, {f:.4f}   {b:>24.4f}, {g:.4f}", flush=True)


def evaluate(parts: dict[str, tuple[Samples, Samples]], model: Params) -> tuple[float, float]:
    """Accuracy and macro-F1 over the pooled test beats, each device with its own prototypes."""
    params = trees.apply(lambda a: a.astype(np.float32), model)
    said, true = [], []
    for own, later in parts.values():
        prototypes = Prototypes.from_support(lambda x: local_training.embed(NETWORK, params, x), own.x, own.y, 3)
        said.append(prototypes.probabilities(local_training.embed(NETWORK, params, later.x)).argmax(1))
        true.append(later.y)
    answers, labels = np.concatenate(said), np.concatenate(true)
    scores = []
    for k in range(3):
        both, either = ((answers == k) & (labels == k)).sum(), (answers == k).sum() + (labels == k).sum()
        scores.append(2 * both / max(1, either))
    return float((answers == labels).mean()), float(np.mean(scores))


def wide(params: Params) -> Params:
    return trees.apply(lambda a: a.astype(np.float64), params)


if __name__ == "__main__":
    main()
