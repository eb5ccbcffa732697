"""CIFAR-10 with 16 × 16 images, each number the mean of 2 × 2: build/papers/cifar-10-16.npz.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.ratio.small_images
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base.storage import write_atomic
from fleet_core.data.sets.set_cache import load_set

OUT = Path("build/papers/cifar-10-16.npz")


def halved(x_NCHW: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """uint8 [N, C, H / 2, W / 2]."""
    n, channels, height, width = x_NCHW.shape
    blocks = x_NCHW.reshape(n, channels, height // 2, 2, width // 2, 2)
    return np.asarray(np.rint(blocks.mean((3, 5))), np.uint8)


def main() -> None:
    named = load_set("cifar-10")
    parts = [part for part in (named.train, named.test) if part is not None]
    data = io.BytesIO()
    np.savez_compressed(data, x=np.concatenate([halved(part.x) for part in parts]),
                        y=np.concatenate([part.y for part in parts]), classes=np.array(named.train.classes))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(OUT, data.getvalue())


if __name__ == "__main__":
    main()
