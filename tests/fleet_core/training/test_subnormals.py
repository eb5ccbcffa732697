"""Subnormal numbers in numpy."""

from __future__ import annotations

import platform
import sys

import numpy as np
import pytest

from fleet_core.training.subnormals import flushed


def product() -> float:
    """The sum of subnormal products of normal numbers."""
    return float((np.full(8, 1e-20, np.float32) * np.float32(1e-20)).sum())


@pytest.mark.allowed_skip("only Linux")
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="only Linux, x86-64 and ARM64"
)
def test_subnormal_results_are_zero_within_and_as_before_afterwards() -> None:
    before = product()
    with flushed():
        assert product() == 0.0
        assert float(np.float32(2) * np.float32(0.5)) == 1.0
    assert product() == before > 0.0


def test_the_flag_comes_back_after_an_error() -> None:
    with pytest.raises(KeyError), flushed():
        raise KeyError
    assert product() > 0.0
