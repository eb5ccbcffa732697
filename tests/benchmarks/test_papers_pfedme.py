"""The devices of pFedMe's paper, as the authors' program draws them."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.pfedme import published, table

MNIST = (6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958)
"""Number of training and test images of every digit."""


def test_the_devices_of_mnist_have_the_papers_sizes_and_digits_and_share_images() -> None:
    y = np.repeat(np.arange(10), MNIST)
    x = np.arange(len(y)).reshape(-1, 1)  # each image is its own number
    held = published.mnist(x.astype(np.int64), y)
    images = {name: set(held.x[held.client == name, 0].tolist()) for name in held.clients}
    sizes = sorted(int(np.sum(held.client == name)) for name in held.clients)
    assert (len(sizes), int(0.75 * sizes[0]), int(0.75 * sizes[-1])) == (20, *published.MNIST_SIZES)
    for i, name in enumerate(held.clients):
        assert set(held.y[held.client == name].tolist()) == {i % 10, (i + 1) % 10}
        assert len(images[name]) == np.sum(held.client == name)
    every = set().union(*images.values())
    elsewhere = [sum(image in other for other in images.values()) > 1 for own in images.values() for image in own]
    different, shared = published.common(held)
    assert different == len(every) < len(held) / 2
    assert shared == np.mean(elsewhere) > 0.9


@pytest.mark.slow
def test_the_devices_of_synthetic_have_the_papers_sizes_and_answer_by_models_of_their_own() -> None:
    held = published.synthetic()
    sizes = np.unique(np.asarray(held.client), return_counts=True)[1]
    assert (len(sizes), sizes.min(), sizes.max()) == (100, 250, 25_810)
    assert held.x.shape[1:] == (60,)
    assert held.x.dtype.name == "float32"
    by_class = np.array([np.bincount(held.y[held.client == name], minlength=10) for name in held.clients])
    assert len(set(by_class.argmax(axis=1).tolist())) == 10
    assert np.mean(by_class.max(axis=1) / by_class.sum(axis=1)) > 0.3


def test_the_table_of_single_settings_names_what_changed_and_has_the_rounds_that_were_run() -> None:
    rounds = [[40, 0.9, 0.8], [200, 0.92, 0.85], [240, 0.5, 0.5]]
    methods = {label: {"seeds": {"0": {"details": {"rounds": rounds}}}} for label in ("base", "personal-steps-3")}
    rows = [row.split(" | ") for row in table.tables(
        {"experiments": {table.SWEEP: {"methods": methods}}}, _paper())["sweep"].splitlines()[2:]]
    assert [row[0] for row in rows] == ["| as in Table 1, β = 1", "| K = 3"]
    assert rows[1][1:] == ["90.00", "92.00", "—", "—", "80.00", "85.00", "—", "—", "1 |"]


def _paper() -> dict[str, dict[str, list[float]]]:
    return {setting: {row: [0.0, 0.0] for row, *_ in table.ROWS} for setting in table.EXPERIMENTS}
