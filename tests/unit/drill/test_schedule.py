from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill import drill
from hvdrecover.drill.drill import SPACE

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


def test_the_first_host_is_never_cut_off() -> None:
    plan = drill.schedule(["host-cut-off"] * 50, **FACTS)
    assert {strike.rank for run in plan.runs for strike in run} == {1, 2, 3}
