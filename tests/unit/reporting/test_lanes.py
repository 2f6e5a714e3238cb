"""A time line for a terminal."""

import pytest

from hvdrecover.reporting import lanes, reading
from hvdrecover.reporting.timeline import Timeline, trace
from tests.unit.reporting.runs import example


def test_each_rank_has_a_line_and_each_fault_its_number_where_it_began(tmp_path):
    traced = trace(reading.read(example(tmp_path).folder))  # 104 s, one column for each
    lines = lanes.draw(traced, 104 + 7).plain.splitlines()
    assert lines[0].index("1") == 7 + 36
    assert lines[0].index("2") == pytest.approx(7 + 60, abs=1)
    assert lines[2].startswith("rank 1 " + 4 * "░" + 32 * "█" + "▓" + 23 * "█" + 23 * "▓")
    assert lines[3].endswith(" 1 min 44 s")
    assert "▓ recovery" in lines[4]


def test_a_run_without_ranks_is_drawn():
    assert "faults" in lanes.draw(Timeline(0.0, 0.0, {}, [], [], []), 5).plain
