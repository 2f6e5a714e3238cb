"""Words of reports."""

from __future__ import annotations

import pytest

from hvdrecover.reporting.words import duration, roughly


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (0.0123, "0.012 s"),
        (4.0, "4 s"),
        (59.6, "60 s"),
        (119.0, "119 s"),
        (150.0, "2.5 min"),
        (3600.0, "60 min"),
        (86400.0, "24 h"),
        (20 * 86400.0, "20 days"),
    ],
)
def test_rough_durations(length: float, text: str) -> None:
    assert roughly(length) == text


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (None, ""),
        (0.3094, "0.31 s"),
        (9.99, "9.99 s"),
        (12.44, "12.4 s"),
        (99.96, "1 min 40 s"),
        (192.0, "3 min 12 s"),
        (3600.0, "1 h 0 min"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_durations(length: float | None, text: str) -> None:
    assert duration(length) == text
