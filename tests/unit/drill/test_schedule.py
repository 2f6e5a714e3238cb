from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill import drill
from hvdrecover.drill.drill import SPACE
from hvdrecover.errors import ConfigError

NAMES = [f"fault-{number}" for number in range(20)]
FACTS = {"seed": 7, "processes": 4, "commits": 50}


@given(st.integers(1, 20), st.integers(0, 2**32), st.integers(1, 9), st.integers(3, 500), st.integers(1, 4))
def test_each_fault_strikes_as_often_as_asked_for(
    count: int, seed: int, processes: int, commits: int, repeat: int
) -> None:
    names = NAMES[:count]
    plan = drill.schedule(names, seed=seed, processes=processes, commits=commits, repeat=repeat)
    strikes = [strike for run in plan.runs for strike in run]
    assert sorted(strike.fault for strike in strikes) == sorted(names * repeat)
    assert all(0 <= strike.rank < processes and 1 <= strike.commit < commits for strike in strikes)
    for run in plan.runs:
        assert run
        assert [strike.commit for strike in run] == sorted(strike.commit for strike in run)


@given(st.integers(0, 2**32), st.integers(2 * SPACE, 500))
def test_there_is_room_for_a_recovery_between_faults(seed: int, commits: int) -> None:
    plan = drill.schedule(NAMES, seed=seed, processes=2, commits=commits)
    for run in plan.runs:
        gaps = [later.commit - earlier.commit for earlier, later in itertools.pairwise(run)]
        assert all(gap >= SPACE // 2 for gap in gaps)


def test_a_seed_decides_it_all() -> None:
    assert drill.schedule(NAMES, **FACTS) == drill.schedule(NAMES, **FACTS)
    assert drill.schedule(NAMES, **FACTS) != drill.schedule(NAMES, **{**FACTS, "seed": 8})


def test_a_stored_schedule_is_the_same(tmp_path: Path) -> None:
    plan = drill.schedule(NAMES, **FACTS)
    plan.store(tmp_path / "schedule.json")
    assert drill.load(tmp_path / "schedule.json") == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "processes": 2, "runs": [[{"fault": 1}]]}'])
def test_what_is_no_schedule_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^--replay: '.*s\.json'"):
        drill.load(tmp_path / "s.json")


def test_the_first_host_is_never_cut_off() -> None:
    plan = drill.schedule(["host-cut-off"] * 50, **FACTS)
    assert {strike.rank for run in plan.runs for strike in run} == {1, 2, 3}
