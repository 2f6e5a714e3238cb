from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill import schedule
from hvdrecover.drill.schedule import SPACE, Strike
from hvdrecover.errors import ConfigError

NAMES = [f"fault-{number}" for number in range(20)]
FACTS = {"seed": 7, "processes": 4, "commits": 50}


@given(st.integers(1, 20), st.integers(0, 2**32), st.integers(1, 9), st.integers(3, 500), st.integers(1, 4))
def test_each_fault_strikes_as_often_as_asked_for(
    count: int, seed: int, processes: int, commits: int, repeat: int
) -> None:
    names = NAMES[:count]
    plan = schedule.each_once(names, seed=seed, processes=processes, commits=commits, repeat=repeat)
    strikes = [strike for run in plan.runs for strike in run]
    assert sorted(strike.fault for strike in strikes) == sorted(names * repeat)
    assert all(0 <= strike.rank < processes and 1 <= strike.commit < commits for strike in strikes)
    for run in plan.runs:
        assert run
        assert [strike.commit for strike in run] == sorted(strike.commit for strike in run)


@given(st.integers(0, 2**32), st.integers(2 * SPACE, 500))
def test_there_is_room_for_a_recovery_between_faults(seed: int, commits: int) -> None:
    plan = schedule.each_once(NAMES, seed=seed, processes=2, commits=commits)
    for run in plan.runs:
        gaps = [later.commit - earlier.commit for earlier, later in itertools.pairwise(run)]
        assert all(gap >= SPACE // 2 for gap in gaps)


def test_a_run_with_room_for_all_is_one_run() -> None:
    assert len(schedule.each_once(NAMES, seed=0, processes=2, commits=100).runs) == 1
    assert len(schedule.each_once(NAMES, seed=0, processes=2, commits=4).runs) == 20


@pytest.mark.parametrize("make", [schedule.each_once, lambda *a, **k: schedule.at_random(*a, **k, mean=5)])
def test_a_seed_decides_it_all(make) -> None:
    assert make(NAMES, **FACTS) == make(NAMES, **FACTS)
    assert make(NAMES, **FACTS) != make(NAMES, **{**FACTS, "seed": 8})


def test_faults_at_random_come_as_often_as_they_should_and_in_order() -> None:
    plan = schedule.at_random(NAMES, seed=1, processes=2, commits=10_000, mean=10, repeat=3)
    for run in plan.runs:
        assert 850 < len(run) < 1150  # 1000 +- 5 standard deviations
        assert [strike.commit for strike in run] == sorted(strike.commit for strike in run)


def test_of_faults_at_random_all_come_before_one_comes_again() -> None:
    (run,) = schedule.at_random(NAMES, seed=1, processes=2, commits=10_000, mean=10).runs
    names = [strike.fault for strike in run]
    rounds = [names[start : start + len(NAMES)] for start in range(0, len(names) - len(NAMES), len(NAMES))]
    assert all(sorted(each) == sorted(NAMES) for each in rounds)
    assert len(set(map(tuple, rounds))) == len(rounds)  # in another order


@given(st.integers(1, 20), st.integers(3, 500))
def test_what_a_run_was_too_short_for_strikes_the_same_ranks_in_another(count: int, commits: int) -> None:
    missed = [Strike(name, place, 400) for place, name in enumerate(NAMES[:count])]
    strikes = schedule.spread(missed, commits)
    assert [(each.fault, each.rank) for each in strikes] == [(each.fault, each.rank) for each in missed]
    assert all(1 <= each.commit < commits for each in strikes)
    assert [each.commit for each in strikes] == sorted(each.commit for each in strikes)


def test_a_stored_schedule_is_the_same(tmp_path: Path) -> None:
    plan = schedule.each_once(NAMES, **FACTS)
    plan.store(tmp_path / "schedule.json")
    assert schedule.load(tmp_path / "schedule.json") == plan


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "processes": 2, "runs": [[{"fault": 1}]]}'])
def test_what_is_no_schedule_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^--replay: '.*s\.json'"):
        schedule.load(tmp_path / "s.json")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "kill (rank 3) at commit 5"),
        ("kill-all", "kill-all at commit 5"),
        ("host-cut-off", "host-cut-off (the host of rank 3) at commit 5"),
    ],
)
def test_it_is_told_what_strikes_whom_and_when(fault: str, words: str) -> None:
    assert str(Strike(fault, 3, 5)) == words


def test_the_first_host_is_never_cut_off() -> None:
    plan = schedule.each_once(["host-cut-off"] * 50, **FACTS)
    assert {strike.rank for run in plan.runs for strike in run} == {1, 2, 3}
