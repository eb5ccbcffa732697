"""Where a mistake in a TOML file is said to be, and that a file with thousands of them is read once."""

import pytest

from fleet_core.base import config
from fleet_core.base.schema import Problem

TEXT = """\
name = "mill"
link.up = "int8"

[train]
rate = 0.1

[[devices]]
file = "a.toml"

[devices.wifi]
ssid = "hall"

[[devices]]
to = "pi@b"

[train.only]
first = 1
"""


@pytest.mark.parametrize(("key", "line"), [
    ("name", 1),
    ("link.up", 2),
    ("train.rate", 5),
    ("train.only.first", 17),
    ("devices[0].file", 8),
    ("devices[0].wifi.ssid", 11),
    ("devices[1].to", 14),
    ("train", 4),
    ("train.steps", 4),  # not there: its table
    ("train.only.second", 16),
    ("devices[0].wifi.country", 10),
    ("devices[1].wifi.country", 13),
    ("devices[7].file", 1),
    ("rounds", 1),
])
def test_a_mistake_is_said_with_the_line_that_sets_the_key_or_the_nearest_table(key: str, line: int) -> None:
    assert config.line_of(TEXT, key) == line


class Counted(str):
    read = 0

    def splitlines(self, keepends: bool = False) -> list[str]:
        Counted.read += 1
        return super().splitlines(keepends)


def test_a_file_is_read_once_for_all_its_mistakes() -> None:
    text = Counted("".join(f'[[devices]]\nfile = "d{number}.toml"\n' for number in range(10_000)))
    problems = [Problem(f"devices[{number}].file", "is not there") for number in range(10_000)]
    lines = str(config.mistakes(problems, text, "fleet.toml")).splitlines()
    assert Counted.read == 1
    assert lines[9_999] == "fleet.toml:20000: devices[9999].file: is not there"
