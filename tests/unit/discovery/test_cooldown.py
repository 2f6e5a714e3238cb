"""Hosts that were reported as failing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.discovery.cooldown import FIRST, LONGEST, ends_at, read, report


def test_reports_are_read_back_also_after_a_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "failing-hosts"
    assert read(path) == read(None) == {}
    report(path, "a", 1.0)
    with path.open("a") as file:
        file.write('{"time": 2, "ho\n7\n')
    report(path, "b", 3.5)
    report(path, "a", 4.0)
    assert read(path) == {"a": [1.0, 4.0], "b": [3.5]}


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(0, 0.0), (1, 0.0), (2, FIRST), (3, 2 * FIRST), (4, 4 * FIRST), (12, LONGEST), (2000, LONGEST)],
)
def test_rest_grows_up_to_a_limit(count: int, seconds: float) -> None:
    until = ends_at([1000.0] * count, 1000.0)
    assert until == (1000.0 + seconds if seconds else 0.0)


def test_a_clock_that_was_set_back_excludes_no_host() -> None:
    times = [1e6 - 20, 1e6 - 10]
    assert ends_at(times, 1e6 - 15) == 1e6 - 10 + FIRST  # by seconds: as if nothing had happened
    back = 1e6 - 86400
    assert ends_at(times, back) == 0.0
    assert ends_at([*times, back - 5], back) == 0.0
    assert ends_at([*times, back - 5, back - 1], back) == back - 1 + FIRST


def test_a_rest_ends_and_is_forgotten() -> None:
    times = [1000.0, 1010.0]
    assert ends_at(times, 1010.0 + FIRST - 1) == 1010.0 + FIRST
    assert ends_at(times, 1010.0 + FIRST) == 0.0
    later = 1000.0 + 7 * 3600
    assert ends_at([*times, later], later) == 0.0
