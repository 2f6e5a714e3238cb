"""The plan and the vote of replays, and states that cannot have them."""

from __future__ import annotations

from collections import Counter

import pytest

from hvdrecover.errors import ConfigError
from hvdrecover.guard.settings import Guard
from hvdrecover.virtual.replay import judge, plan
from hvdrecover.virtual.shares import run_of
from tests.unit.state.jobs import Process, on_ranks
from tests.unit.virtual import test_runs

# -- decisions ----------------------------------------------------------------------------------------------


def test_a_share_of_the_steps_is_replayed() -> None:
    replayed = [step for step in range(20_000) if plan(7, step, (2, 2), 0.01, calibrate=False)]
    assert 150 < len(replayed) < 250
    assert all(plan(7, step, (2, 2), 1.0, calibrate=False) for step in range(100))
    assert not any(plan(7, step, (2, 2), 0.0, calibrate=False) for step in range(100))
    assert replayed != [step for step in range(20_000) if plan(8, step, (2, 2), 0.01, calibrate=False)]


@pytest.mark.parametrize("counts", [(2, 2), (3, 0, 2), (1, 1, 1, 1), (0, 5), (4, 1, 0, 0)])
def test_processes_are_checked_by_their_last_part_and_by_others(counts: tuple[int, ...]) -> None:
    owners: Counter[int] = Counter()
    spares = {process for process, count in enumerate(counts) if not count}
    for step in range(3000):
        found = plan(1, step, counts, 1.0, calibrate=False)
        assert found is not None
        assert found.rank == run_of(counts, found.owner)[-1]
        (other,) = found.others
        assert other != found.owner
        assert other in spares or not spares - {found.owner}
        owners[found.owner] += 1
    for process, count in enumerate(counts):  # as often as they have work to do
        assert owners[process] == pytest.approx(3000 * count / sum(counts), rel=0.15)


def test_a_lone_process_checks_itself_and_all_calibrate() -> None:
    alone = plan(1, 5, (4,), 1.0, calibrate=False)
    assert alone is not None
    assert (alone.owner, alone.others) == (0, (0,))
    first = plan(1, 5, (2, 1, 1), 0.0, calibrate=True)
    assert first is not None
    assert {first.owner, *first.others} == {0, 1, 2}


def runs(*digests: tuple[int, str]) -> list[tuple[int, tuple[str, ...]]]:
    return [(process, (digest, "same")) for process, digest in digests]


@pytest.mark.parametrize(
    ("ballots", "right", "wrong", "tied"),
    [
        ([(0, "a"), (1, "b"), (2, "a")], {0, 2}, {1}, False),
        ([(0, "a"), (1, "b"), (2, "b")], {1, 2}, {0}, False),
        ([(0, "a"), (0, "b"), (1, "b"), (1, "b")], {0, 1}, {0}, False),
        ([(0, "a"), (0, "a"), (1, "b"), (1, "b")], {0}, {1}, True),
        ([(0, "a"), (0, "b"), (0, "b")], {0}, {0}, False),
    ],
)
def test_computations_vote(
    ballots: list[tuple[int, str]], right: set[int], wrong: set[int], tied: bool
) -> None:
    result, unlike = judge(runs(*ballots), calibrates=False)
    assert {ballots[each][0] for each in result.right} == right
    assert {ballots[each][0] for each in result.wrong} == wrong
    assert (result.tied, unlike) == (tied, False)


def test_no_fault() -> None:
    _, every_time_another = judge(runs((0, "a"), (1, "b"), (2, "c")), calibrates=False)
    _, other_kinds = judge(runs((0, "a"), (0, "a"), (1, "b"), (1, "b")), calibrates=True)
    _, once = judge(runs((0, "a"), (0, "b"), (1, "b"), (1, "b")), calibrates=True)
    assert every_time_another
    assert other_kinds
    assert not once


# -- what is refused ----------------------------------------------------------------------------------------


def test_jobs_without_virtual_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^replay: .*virtual ranks"):
        on_ranks(1, lambda process: process.state(guard=Guard(replay=0.1), epoch=0))


def test_frameworks_that_can_not_are_refused() -> None:
    def body(process: Process) -> None:
        ranks = test_runs.virtual(test_runs.Carrier(process.world))
        process.state(guard=Guard(replay=0.1), virtual=ranks, epoch=0)

    with pytest.raises(ConfigError, match=r"^replay: .*Guard\(replay="):
        on_ranks(1, body)
