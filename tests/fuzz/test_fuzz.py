"""No parser of outside bytes ends with another error than the product's own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz import run
from tests.fuzz.targets import TARGETS

CHANGES = 30
CI_INPUTS = 200_000
"""A minute or less, and the same inputs each time; longer runs are made by hand."""


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TARGETS))
def test_a_changed_byte_is_refused_in_the_products_own_words(name: str) -> None:
    target, draw = TARGETS[name], random.Random(name)
    for seed in target.seeds():
        target(seed)
        for _ in range(CHANGES if seed else 0):
            data = bytearray(seed)
            data[draw.randrange(len(data))] = draw.randrange(256)
            target(bytes(data))
            target(bytes(data[: draw.randrange(len(data))]))


VALID = [name for name in TARGETS if name not in ("inventory",)]  # its file names another one


@pytest.mark.parametrize("name", VALID)
@pytest.mark.slow
def test_the_first_input_is_valid_so_that_the_fuzzer_begins_inside(name: str) -> None:
    target = TARGETS[name]
    target.parse(target.seeds()[0])


@pytest.mark.slow
def test_fuzzing_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed: there is none for this machine")
    found = run.in_child(run.ALL, tmp_path, inputs=CI_INPUTS, seconds=0)
    assert found["failed"] == ""
    assert found["inputs"] == CI_INPUTS
