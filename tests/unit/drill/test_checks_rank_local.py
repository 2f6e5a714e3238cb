"""State that each rank has of its own is not a bug of a script, and hides none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from hvdrecover.drill.checks import rank_local, rules, script
from tests.unit.drill.lines import Story

Row = Mapping[str, Any]


def own(commit: int, ranks: tuple[int, int] = (0, 1)) -> list[Row]:
    """State that each rank has of its own at a commit, having resumed from what these ranks had."""
    return [
        {"mean": f"{of} at {commit}", "losses": [commit, 10 * of], "stats": {"noise": of + commit, "seen": 7}}
        for of in ranks
    ]


def clean(make: Callable[[int], list[Row]] = own, size: int = 2) -> Story:
    story = Story(size).rendezvous(1, 0)
    for commit in range(1, 5):
        story.step().commit(own=make(commit))
    return story


def disturbed(ranks: tuple[int, int], *, early: tuple[int, int] = (0, 1)) -> Story:
    """Rank 0 was killed after two commits, and both have resumed from what these ranks had."""
    story = Story().rendezvous(2, 0)
    for commit in (1, 2):
        story.step().commit(own=own(commit, early))
    story.rendezvous(3, 2, 0)
    return story.step().commit(own=own(3, ranks)).step().commit(own=own(4, ranks))


@pytest.mark.parametrize(("ranks", "rank"), [((1, 1), 0), ((0, 0), 1)])
def test_it_is_named_as_what_it_is(ranks: tuple[int, int], rank: int) -> None:
    expected, mine = clean().told, disturbed(ranks).told
    assert script.weights(expected, mine, explained=False) == []
    assert script.compared(expected, mine) == 4
    found = script.replaced(expected, mine)
    assert found.finding is not None
    assert found.finding.rule is rules.RANK_LOCAL
    assert f"from commit 3 on, rank {rank} resumes from another rank's model.mean" in found.finding.message
    assert found.names == {"model.mean", "losses.1", "stats.noise"}


def test_nothing_is_said_where_all_ranks_have_their_own_again() -> None:
    expected, mine = clean().told, disturbed((0, 1)).told
    assert script.weights(expected, mine, explained=False) == []
    assert script.replaced(expected, mine) == rank_local.RankLocal()


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ({"tensors": "other"}, "1 of 3 tensors of model (weight)"),  # such as an optimizer that was reset
        ({"values": {"batch": 0}}, "batch is 0, not null"),
        ({"own": [{**each, "stats": {**each["stats"], "seen": 0}} for each in own(3, (1, 1))]}, "stats.seen"),
    ],
)
def test_a_bug_beside_it_is_still_caught(bug: dict[str, Any], words: str) -> None:
    story = Story().rendezvous(2, 0)
    for commit in (1, 2):
        story.step().commit(own=own(commit))
    story.rendezvous(3, 2, 0).step().commit(**{"own": own(3, (1, 1)), **bug})
    (found,) = script.weights(clean().told, story.told, explained=False)
    assert found.rule is rules.WEIGHTS
    assert "commit 3 is not that" in found.message and words in found.message
    assert "mean" not in found.message and "noise" not in found.message


def test_what_may_follow_from_it_is_told_with_that_cause() -> None:
    story = Story().rendezvous(2, 0).step().commit(own=own(1)).rendezvous(3, 1, 0)
    story.step().commit(own=own(2, (1, 1))).step().commit("other", own=own(3, (1, 1)))
    (found,) = script.weights(clean().told, story.told, explained=False)
    assert found.rule is rules.WEIGHTS
    assert "commit 3 is not that" in found.message
    assert "rank-local state was another rank's from commit 2 on" in found.message


@pytest.mark.parametrize(("usual", "found"), [(False, [rules.WEIGHTS]), (True, [])])
def test_a_list_that_the_script_sets_anew_after_a_recovery_is_its_own_fault(usual: bool, found: Any) -> None:
    before = {"losses": [[2, 10], []]}
    expected = Story().rendezvous(1, 0).changed(values=before if usual else {})
    story = Story().rendezvous(2, 0)
    for commit in (1, 2, 3):
        expected.step().commit(own=own(commit))
        story.step().commit(own=own(commit)) if commit < 3 else None
    story.rendezvous(3, 2, 0).changed(values=before).step()
    story.commit(own=[{**each, "losses": [3]} for each in own(3, (1, 1))])
    findings = script.weights(expected.told, story.told, explained=False)
    assert [each.rule for each in findings] == found
    assert all("losses is [3], not [3, 0]" in each.message for each in findings)


def test_before_any_recovery_it_explains_nothing() -> None:
    (found,) = script.weights(clean().told, disturbed((1, 1), early=(1, 1)).told, explained=False)
    assert found.rule is rules.REPRODUCIBLE
    assert "model (mean)" in found.message


def test_what_all_ranks_have_alike_is_not_rank_local() -> None:
    """Synchronized batch norm: it differs after a recovery, and no other rank had it so."""
    expected = clean(lambda commit: own(commit, (0, 0))).told
    mine = disturbed((1, 1), early=(0, 0)).told
    (found,) = script.weights(expected, mine, explained=False)
    assert found.rule is rules.WEIGHTS
    assert script.replaced(expected, mine).finding is None


def test_weights_that_differ_between_the_ranks_are_not_rank_local() -> None:
    def apart(story: Story) -> Story:
        for line in [each for each in story.told.commits if each.rank == 1]:
            story.lines[story.lines.index(line)] = type(line)(
                **{**vars(line), "tensors": {"model": {**line.tensors["model"], "weight": "own"}}}
            )
        return story

    assert "model.weight" not in rank_local.own(apart(clean()).told).tensors


def test_tensors_and_lists_of_other_lengths_are_covered_up_to_their_attribute() -> None:
    def plain(commit: int) -> Story:
        story = Story().rendezvous(1, 0).step()
        return story.commit(values={"a": [0]}, own=[{"b": [1]}, {"b": [1, 2]}])

    mine = rank_local.own(plain(1).told)
    assert mine.values == {"b"}
    assert mine.tensors == frozenset()
