"""Readings in lines of text: what a line may be, and what becomes of those that are wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.sources.interface import Item, Lost
from edge_agent.sources.text_lines import MAX_LINE_BYTES, TextLines
from fleet_core.data.live import Readings, Taken

NOW = 1_700_000_000.0


def lines_of(*columns: str, partial: bool = False) -> TextLines:
    return TextLines(columns, partial=partial, clock=lambda: NOW)


def plain(items: list[Item]) -> list[object]:
    """What items hold, for comparison."""
    return [(one.values.tolist(), one.time.tolist(), one.labels, one.timed) if isinstance(one, Readings)
            else (one.x.tolist(), one.time, one.label) if isinstance(one, Taken) else one.why for one in items]


@pytest.mark.parametrize(("text", "columns", "wanted"), [
    ("ax,ay\n1,2\n3,4\n", (), [([[1, 2], [3, 4]], [NOW, NOW], None, False)]),
    ("ax,ay\n1,2\n", ("ay", "ax"), [([[2, 1]], [NOW], None, False)]),
    ("1,2\n", (), [([[1, 2]], [NOW], None, False)]),
    ("1.5\t-2e3  7\n", (), [([[1.5, -2000, 7]], [NOW], None, False)]),
    ("1,2,on\n", ("ax", "ay", "label"), [([[1, 2]], [NOW], ["on"], False)]),
    ("time,ax,label\n0.5,1,on\n0.6,2,\n", (), [([[1], [2]], [0.5, 0.6], ["on", ""], True)]),
    ("client,ax\npump,1\n", (), [([[1]], [NOW], None, False)]),
    ('{"ax": 1, "time": 5}\n{"time": 6, "ax": 2, "other": "x"}\n', (), [([[1], [2]], [5, 6], None, True)]),
    ('{"ax": 1, "ay": 2, "label": "on"}\n', ("ay",), [([[2]], [NOW], ["on"], False)]),
    ("[1, 2.5]\n", (), [([[1, 2.5]], [NOW], None, False)]),
    ('{"x": [[1, 2], [3, 4]], "label": "b"}\n', (), [([[1, 2], [3, 4]], NOW, "b")]),
    ('{"x": [1.5], "time": 1600000000}\n', (), [([1.5], 1_600_000_000, "")]),
    ("\n\n21.5\n", (), [([[21.5]], [NOW], None, False)]),
    ('"1","2"\r\n', (), [([[1, 2]], [NOW], None, False)]),
    ("ax,ay\n1,2\nax,ay\n3,4\n", (), [([[1, 2]], [NOW], None, False), "", ([[3, 4]], [NOW], None, False)]),
])  # fmt: skip
def test_a_line_may_have_many_forms(text: str, columns: tuple[str, ...], wanted: list[object]) -> None:
    assert plain(lines_of(*columns).more(text.encode())) == wanted


@pytest.mark.parametrize(("text", "said"), [
    ("1,2\n1,2,3\n", "a line has 3 cells; expected 2: 1,2,3"), ("ax,ay\n1,x\n", "'x' of ay is not a number"),
    ("1,2\n1,nan\n", "nan of channel 2 is not finite"), ('{"ax": 1}\n{"ay": 1}\n', "a line has no 'ax'"),
    ('{"ax": true}\n', "true of ax is not a number"), ('{"ax": NaN}\n', "NaN is not a JSON number"),
    ('{"ax": 1\n', "a line cannot be read: Expecting"), ('{"x": [[1], [2, 3]]}\n', "x is empty, ragged"),
    ('{"ax": 1, "label": [1]}\n', "the label [1] is not text"), ('{"label": "on"}\n', "a line has no number"),
    ("[[1, 2]]\n", "[1, 2] of number 1 is not a number"), ('{"ax": 1e999}\n', "inf of ax is not finite"),
    ("[" * 5000 + "\n", "a line cannot be read"), ("1," + "9" * MAX_LINE_BYTES + "\n", "a line of over 65536 bytes"),
    ('a,"b\n', "a line cannot be read"), ("1,2\n\xff\n".encode("latin-1").decode("latin-1"), "a line"),
])  # fmt: skip
def test_a_line_that_is_wrong_is_lost_and_said(text: str, said: str) -> None:
    items = lines_of().more(text.encode("latin-1"))
    lost = [one for one in items if isinstance(one, Lost)]
    assert len(lost) == 1
    assert said in lost[0].why


def test_a_line_after_a_wrong_one_counts() -> None:
    assert plain(lines_of().more(b"1,2\nx\n3,4\n"))[-1] == ([[3, 4]], [NOW], None, False)


def test_a_line_without_end_takes_no_memory() -> None:
    text = lines_of()
    found = [one for _ in range(100) for one in text.more(b"7" * 10_000)]
    assert len([one for one in found if isinstance(one, Lost)]) <= 100 * 10_000 // MAX_LINE_BYTES + 1
    assert len(text._rest) <= MAX_LINE_BYTES
    assert plain(text.more(b"7\n1,2\n"))[-1] == ([[1, 2]], [NOW], None, False)


def test_a_first_line_that_may_be_cut_is_not_read() -> None:
    assert plain(lines_of(partial=True).more(b"5,2\n1,2\n")) == [([[1, 2]], [NOW], None, False)]


def test_a_last_line_needs_no_end() -> None:
    text = lines_of()
    assert text.more(b"1,2") == []
    assert plain(text.last()) == [([[1, 2]], [NOW], None, False)]


@given(st.binary(max_size=300), st.lists(st.integers(0, 40), max_size=10))
def test_any_bytes_give_items_and_no_error(data: bytes, cuts: list[int]) -> None:
    text, at = lines_of(), 0
    for cut in (*cuts, len(data)):
        text.more(data[at : at + cut])
        at += cut
    text.last()
