"""What the drill finds when it compares a run with faults with an undisturbed one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.drill import check, faults
from hvdrecover.drill.check import Finding, compare
from hvdrecover.drill.run import Command, ScriptRun
from hvdrecover.drill.witness import Records
from tests.unit.checkpoint.roots import make_snapshot, make_store
from tests.unit.drill.lines import Story


def train(story: Story, start: int, end: int) -> Story:
    for number in range(start, end):
        story.step(samples=(4 * number, 4 * number + 1), at=4 * number)
        story.step(samples=(4 * number + 2, 4 * number + 3), at=4 * number + 2).commit()
    return story


def clean() -> Story:
    return train(Story().rendezvous(1, 0), 0, 6)


def disturbed(again: int = 2) -> Story:
    """Killed after two commits and a step, and resumed from one of them."""
    story = train(Story().rendezvous(2, 0), 0, 2).step(samples=(8, 9), at=8)
    return story.rendezvous(3, again, 0, 1)


def checks(expected: Records, mine: Records) -> list[str]:
    return [finding.check for finding in compare(expected, mine).findings]


def the(name: str, mine: Story) -> Finding:
    """Return the finding of a check; others may follow from it."""
    found = compare(clean().records, mine.records).findings
    return next(each for each in found if each.check == name)


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_run_that_continues_from_a_commit_passes(again: int) -> None:
    mine, expected = train(disturbed(again), again, 6).records, clean().records
    found = compare(expected, mine)
    assert (found.findings, found.samples_miscounted, found.compared) == ([], 0, 6)


def test_samples_that_are_lost_or_repeated_are_counted() -> None:
    story = train(disturbed().step(samples=(8, 8), at=8).commit(), 3, 6)
    found = the(check.SAMPLES_ONCE, story)
    assert "3 samples were lost (9, 10, 11), 1 were trained on again (8)" in found.message
    assert compare(clean().records, story.records).samples_miscounted == 4


def test_a_script_that_records_no_batches_is_told_that_samples_are_not_checked() -> None:
    story = Story().rendezvous(1, 0).commit(steps=1, batches=0).commit(steps=1, batches=0).records
    assert [each.check for each in compare(story, story).notes] == [check.UNRECORDED]
    assert compare(clean().records, clean().records).notes == []


def test_steps_that_were_done_again_are_counted_once_for_all_ranks() -> None:
    story = Story().rendezvous(1, 0).step().commit().step().step()
    assert story.records.steps_repeated == 0
    assert story.rendezvous(2, 1, 0).step().step().records.steps_repeated == 2


def test_runs_are_compared_up_to_another_number_of_ranks_and_the_rest_is_told() -> None:
    story = disturbed().step(samples=(8, 9), at=8).step(samples=(10, 11), at=10).commit()
    story.rendezvous(4, 3, size=1).step().commit("other")
    expected, mine = clean().records, story.records
    assert checks(expected, mine) == []
    assert compare(expected, mine).compared == 3
    found = compare(expected, mine).not_compared
    assert "from commit 4 on nothing was compared, as 1 of 2 ranks went on" in found


@pytest.mark.parametrize(("weights", "broken"), [("3", []), ("other", [check.SAME_COMMITS])])
def test_with_virtual_ranks_commits_are_compared_on_any_number_of_ranks(
    weights: str, broken: list[str]
) -> None:
    expected = Story().rendezvous(1, 0)
    for _ in range(3):
        expected.step().commit(virtual=4)
    mine = Story().rendezvous(1, 0).step().commit(virtual=4).rendezvous(2, 1, size=1).step()
    mine.commit(virtual=4).rendezvous(3, 2, 1, size=1).step().commit(weights, virtual=4)
    found = compare(expected.records, mine.records)
    assert (found.compared, found.not_compared) == (3, "")
    assert [each.check for each in found.findings] == broken


def own(commit: int, ranks: tuple[int, int] = (0, 1)) -> list[Mapping[str, Any]]:
    """Return the rank-local state at a commit, if the ranks have resumed with that of these ranks."""
    return [
        {"mean": f"{of} at {commit}", "losses": [commit, 10 * of], "stats": {"noise": of + commit, "seen": 7}}
        for of in ranks
    ]


def with_own(story: Story, *commits: int, ranks: tuple[int, int] = (0, 1)) -> Story:
    for commit in commits:
        story.step().commit(own=own(commit, ranks))
    return story


LOCAL = with_own(Story().rendezvous(1, 0), 1, 2, 3, 4).records


def local(*commits: int, ranks: tuple[int, int]) -> Story:
    """Rank 0 was killed after two commits, and both ranks have resumed with the state of these ranks."""
    return with_own(with_own(Story().rendezvous(2, 0), 1, 2).rendezvous(3, 2, 0), *commits, ranks=ranks)


@pytest.mark.parametrize(("ranks", "rank"), [((1, 1), 0), ((0, 0), 1)])
def test_rank_local_state_is_named_and_is_no_failure(ranks: tuple[int, int], rank: int) -> None:
    mine = local(3, 4, ranks=ranks).records
    assert checks(LOCAL, mine) == []
    found = compare(LOCAL, mine)
    (note,) = (each for each in found.notes if each.check == check.RANK_LOCAL)
    assert set(found.rank_local) == {"model.mean", "losses.1", "stats.noise"}
    assert f"from commit 3 on, rank {rank} has another rank's model.mean" in note.message


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ({"tensors": "other"}, "1 tensor of model (weight)"),
        ({"values": {"batch": 0}}, "batch is 0, expected (none)"),
        ({"own": [{**each, "stats": {**each["stats"], "seen": 0}} for each in own(3, (1, 1))]}, "stats.seen"),
    ],
)
def test_a_bug_beside_rank_local_state_is_still_found(bug: dict[str, Any], words: str) -> None:
    mine = local(ranks=(0, 1)).step().commit(**{"own": own(3, (1, 1)), **bug}).records
    (found,) = compare(LOCAL, mine).findings
    assert found.check == check.SAME_COMMITS
    assert "commit 3 differs" in found.message and words in found.message
    assert "mean" not in found.message and "noise" not in found.message


def test_weights_that_differ_between_ranks_are_not_rank_local() -> None:
    expected = Story().rendezvous(1, 0).step().commit().step().commit()
    for place, each in enumerate(expected.lines):
        if each.rank == 1 and each.tensors:
            tensors = {"model": {**vars(each)["tensors"]["model"], "weight": "of rank 1"}}
            expected.lines[place] = dataclasses.replace(each, tensors=tensors)
    mine = Story().rendezvous(1, 0).step().commit().rendezvous(2, 1, 0).step().commit("of rank 1").records
    assert checks(expected.records, mine) == [check.SAME_COMMITS]


def test_a_broken_commit_is_found_unless_the_drill_broke_it(tmp_path: Path) -> None:
    ended = ScriptRun(tmp_path / "run", Command(("train",), 2))
    store = make_store(open_storage(str(ended.root)))
    store.claim_next()
    for number in (1, 2):
        store.write(make_snapshot(1, number), rank=0)
    ended.codes.append(0)
    newest = faults.complete(ended)[0]
    faults.spoil(ended.root / newest.name)
    (found,) = check.machine(ended, [], 0)
    assert found.check == check.ROOT_INTACT and newest.name in found.message
    ended.damaged.add(newest)
    assert check.machine(ended, [], 0) == []
    assert [each.check for each in check.machine(ended, [], 1)] == [check.EXIT_CODE]
