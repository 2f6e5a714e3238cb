from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill import drill

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


def test_a_seed_decides_it_all() -> None:
    assert drill.schedule(NAMES, **FACTS) == drill.schedule(NAMES, **FACTS)
    assert drill.schedule(NAMES, **FACTS) != drill.schedule(NAMES, **{**FACTS, "seed": 8})


def test_the_first_host_is_never_cut_off() -> None:
    plan = drill.schedule(["host-cut-off"] * 50, **FACTS)
    assert {strike.rank for run in plan.runs for strike in run} == {1, 2, 3}
