"""The benchmark of secure aggregation: its page is what its result gives."""

from __future__ import annotations

from benchmarks import markdown
from benchmarks.privacy.secure import PAGE, VALUES, known, measure, table


def test_the_page_is_what_the_result_gives() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert markdown.filled(text, {"secure": table(known())}) == text


def test_four_devices_are_measured() -> None:
    found = measure(4)
    assert found["masked_bytes"] == 2 * VALUES
    assert found["up_bytes"] > found["masked_bytes"]
    assert found["device_s"] > 0
