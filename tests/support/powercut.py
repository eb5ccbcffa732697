"""A power cut at a chosen write: from that write on nothing comes to the disk, and what ran is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_core.base import storage


class PowerCut(BaseException):
    """Caught by nothing of the product."""


@contextlib.contextmanager
def cut_at(number: int) -> Iterator[list[int]]:
    """Around what writes: its ``number``-th atomic write is a power cut that ends the block. Yields [writes begun]."""
    write, begun = storage.write_atomic, [0]

    def failing(*arguments: Any, **options: Any) -> None:
        begun[0] += 1
        if begun[0] == number:
            raise PowerCut
        write(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PowerCut):
        patch.setattr(storage, "write_atomic", failing)
        yield begun
