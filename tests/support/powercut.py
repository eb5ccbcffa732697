"""A power cut at a chosen write: nothing is written from then on, and the running code ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from fleet_core.base import storage


class PowerCut(BaseException):
    """The product catches no such exception."""


@contextlib.contextmanager
def cut_at(number: int) -> Iterator[list[int]]:
    """The block's ``number``-th atomic write is a power cut, which ends the block. Yields [writes begun]."""
    write, begun = storage.write_atomic, [0]

    def failing(*arguments: Any, **options: Any) -> None:
        begun[0] += 1
        if begun[0] == number:
            raise PowerCut
        write(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PowerCut):
        patch.setattr(storage, "write_atomic", failing)
        yield begun
