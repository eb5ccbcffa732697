"""PFLlib's side of a run, by its own servers and clients. It runs in PFLlib's own virtual environment.

    python -m benchmarks.peers.theirs PFLLIB FOLDER

PFLLIB is a checkout. FOLDER has each set of images in a folder of its name, in PFLlib's form, and the first weights
(``division``, ``run``). PFLlib reads and writes beside its working folder, so this works in that folder, and writes
nothing into the checkout. ``main.py`` is not
used: it loads every method. Answers as ``ours`` does.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.peers.methods import DATA_SET, DEVICES, METHODS, SETTING, Setting
from benchmarks.peers.network import SETS, Theirs
from benchmarks.peers.turns import serve

NEVER = 10**9
DEFAULTS: dict[str, Any] = {
    "goal": "test", "device": "cpu", "dataset": DATA_SET, "num_classes": 10, "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99, "join_ratio": 1.0, "random_join_ratio": False, "num_clients": DEVICES,
    "eval_gap": NEVER, "save_folder_name": "items", "auto_break": False, "top_cnt": 100, "dlg_eval": False,
    "dlg_gap": 100, "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0,
    "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "time_select": False,
    "time_threthold": 10000.0, "beta": 0.0, "lamda": 1.0, "mu": 0.0, "K": 5, "p_learning_rate": 0.01,
    "privacy": False, "dp_sigma": 0.0,
}
"""PFLlib's own defaults; ``eval_gap`` leaves the evaluation to us."""


class Split(nn.Module):
    """Like PFLlib's ``BaseHeadSplit``, whose module loads every network. The base's arrays come first: PFLlib sets a
    base from a whole model in this order."""

    def __init__(self, whole: Theirs) -> None:
        super().__init__()
        head, whole.fc = whole.fc, nn.Identity()
        self.base, self.head = whole, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.base(x))
        return logits


def arguments(method: str, rounds: int, setting: Setting) -> argparse.Namespace:
    """PFLlib counts rounds from 0 and runs one more."""
    return argparse.Namespace(**{
        **DEFAULTS, "algorithm": method, "global_rounds": rounds - 1, "batch_size": setting.batch,
        "local_learning_rate": setting.rate, "local_epochs": setting.epochs, "plocal_epochs": setting.epochs,
        "fine_tuning_epochs": setting.tuning_epochs, **(METHODS[method].theirs or {}),
    })


def run(
    folder: Path, method: str, network: str, seed: int, rounds: int, setting: Setting = SETTING
) -> dict[str, float]:
    of_set = folder / SETS[network]
    with np.load(of_set / f"first-{network}-{seed}.npz") as file:
        first = [torch.tensor(file[key]) for key in file.files]
    with np.load(of_set / "samples.npz") as file:
        shape = file["x"].shape[1:]
    (of_set / "system").mkdir(exist_ok=True)
    os.chdir(of_set / "system")
    asked, pair = arguments(method, rounds, setting), METHODS[method]
    whole = Theirs(network, shape, first)
    asked.model = Split(whole) if pair.split else whole
    module, name = pair.server
    random.seed(seed)
    np.random.seed(seed)
    server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)(asked, 0)
    torch.manual_seed(seed)  # a client sets it to 0
    if method == "pFedMe":
        for client in server.clients:
            keep_personal(client)
    server.train()
    return evaluated(server, method, setting)


def keep_personal(client: Any) -> None:
    """PFLlib's list of personal parameters is the model's own: what the model gets at the end of ``train``, and with
    the next global model, overwrites them. This copies them before."""
    update = client.update_parameters

    def copied(model: nn.Module, new: Any) -> None:
        client.personalized_params = [array.detach().clone() for array in client.personalized_params]
        update(model, new)

    client.update_parameters = copied


def evaluated(server: Any, method: str, setting: Setting) -> dict[str, float]:
    """As PFLlib evaluates after the last round, with the models that it would evaluate. unchanged: what it reports by
    itself, where this differs: of pFedMe without ``keep_personal``; of Per-FedAvg, whose clients adapt to one batch and
    here, as ours, to all of their samples."""
    if method == "FedBABU":
        return {"accuracy": float(server.rs_test_acc[-1])}  # ``train`` fine-tunes and evaluates at its end
    if METHODS[method].server[1] != "FedProto":  # which sends no model
        server.send_models()
    if method == "Per-FedAvg":
        server.evaluate_one_step()
        for client in server.clients:
            client.batch_size = setting.train
            client.train_one_step()
        return {"accuracy": share(server.test_metrics()), "unchanged": float(server.rs_test_acc[-1])}
    if method == "FedAvg, fine-tuned":
        for client in server.clients:
            for _ in range(setting.tuning_epochs // setting.epochs):
                client.train()
    if method == "pFedMe":
        unchanged = share(server.test_metrics())
        return {"accuracy": share(server.test_metrics_personalized()), "unchanged": unchanged}
    return {"accuracy": share(server.test_metrics())}


def share(figures: Any) -> float:
    """Of the test samples, those that are answered rightly."""
    return float(sum(figures[2]) / sum(figures[1]))


def main() -> None:
    torch.set_num_threads(1)
    pfllib, folder = (Path(name).resolve() for name in sys.argv[1:])
    sys.path.insert(0, str(pfllib / "system"))
    importlib.import_module("flcore.servers.serverbase")
    importlib.import_module("flcore.clients.clientbase")
    serve(partial(run, folder))


if __name__ == "__main__":
    main()
