"""The findings of checks in a run with faults, compared with an undisturbed one."""

from __future__ import annotations

import pytest

from hvdrecover.drill.checks import losses, rules, script
from hvdrecover.drill.checks.rules import Rule
from tests.unit.drill.lines import Story


def clean() -> Story:
    story = Story().rendezvous(1, 0)
    for number in range(6):
        story.step(samples=(4 * number, 4 * number + 1), at=4 * number)
        story.step(samples=(4 * number + 2, 4 * number + 3), at=4 * number + 2).commit()
    return story


def disturbed(again: int = 2) -> Story:
    """Killed after two commits and a step, and resumed from one of them."""
    story = Story().rendezvous(2, 0)
    for number in range(2):
        story.step(samples=(4 * number, 4 * number + 1), at=4 * number)
        story.step(samples=(4 * number + 2, 4 * number + 3), at=4 * number + 2).commit()
    story.step(samples=(8, 9), at=8)
    return story.rendezvous(3, again, 0, 1)


def finish(story: Story, start: int = 2) -> Story:
    for number in range(start, 6):
        story.step(samples=(4 * number, 4 * number + 1), at=4 * number)
        story.step(samples=(4 * number + 2, 4 * number + 3), at=4 * number + 2).commit()
    return story


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_run_that_continues_from_a_commit_breaks_no_rule(again: int) -> None:
    mine, expected = finish(disturbed(again), again).told, clean().told
    assert script.steps_before_commits(expected) == script.steps_before_commits(mine) == []
    assert script.overwritten(expected, mine) == script.counters(expected, mine) == []
    assert script.batches(expected, mine) == script.samples(expected, mine) == []
    assert script.samples_lost(expected, mine) == 0
    assert script.weights(expected, mine, explained=False) == []
    assert script.compared(expected, mine) == 6


def test_tensors_that_are_changed_before_the_first_step_are_named() -> None:
    mine = disturbed().changed({"optimizer": ["exp_avg", "exp_avg_sq"]}).told
    (found,) = script.overwritten(clean().told, mine)
    assert found.rule is rules.NOT_OVERWRITTEN
    assert "from commit 2" in found.message and "2 tensors of state.optimizer (exp_avg" in found.message


def test_what_the_undisturbed_run_changes_as_well_is_no_fault() -> None:
    norm = {"model": ["running_mean"]}
    usual = Story().rendezvous(1, 0).changed(norm, {"warm": [3, 0]}).told
    mine = disturbed().changed(norm, {"warm": [3, 0]}).told
    assert script.overwritten(usual, mine) == script.counters(usual, mine) == []


def test_a_counter_that_falls_is_named() -> None:
    (found,) = script.counters(clean().told, disturbed().changed(values={"batch": [7, 0]}).told)
    assert found.rule is rules.COUNTERS
    assert "state.batch was 7 in commit 2, and 0" in found.message


def test_a_batch_that_begins_with_a_new_epoch_is_no_fall() -> None:
    story = disturbed().changed(values={"batch": [45, 0], "epoch": [0, 1]})
    assert script.counters(clean().told, story.told) == []


@pytest.mark.parametrize(
    ("inputs", "which"), [("3.2", "that of step 2 after commit 3"), ("other", "one it was never given")]
)
def test_another_batch_than_without_the_fault_is_found(inputs: str, which: str) -> None:
    (found,) = script.batches(clean().told, disturbed().step(inputs).told)
    assert found.rule is rules.DATA
    assert "in step 1 after commit 2 of generation 3, rank 0" in found.message and which in found.message


def test_a_batch_of_what_was_lost_does_not_count() -> None:
    story = disturbed().step("other").rendezvous(4, 2, 0, 1)
    assert script.batches(clean().told, finish(story).told) == []


@pytest.mark.parametrize(
    ("dealt", "samples", "found"),
    [
        ("b", (2, 3), False),
        ("other", (2, 3), True),
        ("other", (4, 5), False),  # a matter of samples
        (None, (2, 3), False),
    ],
)
def test_other_contents_of_the_same_samples_are_found_by_what_data_sets_deal(
    dealt: str | None, samples: tuple[int, int], found: bool
) -> None:
    expected = (
        Story().rendezvous(1, 0).step(None, (0, 1), dealt="a").step(None, (2, 3), at=2, dealt="b").commit()
    )
    mine = Story().rendezvous(2, 0).step(None, (0, 1), dealt="a").commit().rendezvous(3, 1, 0, 1)
    findings = script.batches(expected.told, mine.step(None, samples, at=2, dealt=dealt).told)
    assert [each.rule for each in findings] == [rules.DATA] * found
    assert all("at place 2 of epoch 0, after commit 1" in each.message for each in findings)


def test_samples_that_are_lost_or_repeated_are_counted() -> None:
    story = disturbed().step(samples=(8, 8), at=8).commit()
    expected, mine = clean().told, finish(story, 3).told
    (found,) = script.samples(expected, mine)
    assert found.rule is rules.SAMPLES
    assert "3 samples were lost (9, 10, 11), and 1 were trained on once more (8)" in found.message
    assert script.samples_lost(expected, mine) == 4


def test_the_epoch_in_which_a_run_was_ended_lacks_nothing() -> None:
    assert script.samples(clean().told, disturbed().told) == []


def test_a_run_that_was_ended_later_has_more_of_its_last_epoch_and_nothing_twice() -> None:
    more = finish(disturbed()).step(samples=(24, 25), at=24).commit()
    assert script.samples(clean().told, more.told) == []
    (found,) = script.samples(clean().told, more.step(samples=(4, 26), at=26).commit().told)
    assert "0 samples were lost (none), and 1 were trained on once more (4)" in found.message


def test_weights_that_differ_are_told_with_the_last_commit_that_was_right() -> None:
    mine = disturbed().step().step().commit("other", {"lr": 0.1}).told
    expected = clean().told
    (found,) = script.weights(expected, mine, explained=False)
    assert found.rule is rules.WEIGHTS
    assert "commit 3 is not that" in found.message and "as commit 2 still was" in found.message
    assert "1 of 2 tensors of model (weight); lr is 0.1, not null" in found.message


@pytest.mark.parametrize(("explained", "rule"), [(False, rules.REPRODUCIBLE), (True, rules.WEIGHTS)])
def test_what_differs_before_the_first_fault_is_no_matter_of_recovery(explained: bool, rule) -> None:
    mine = Story().rendezvous(2, 0).step().step().commit("other").told
    (found,) = script.weights(clean().told, mine, explained=explained)
    assert found.rule is rule


def test_a_commit_more_when_hosts_come_or_go_shifts_nothing() -> None:
    story = disturbed().commit("2").rendezvous(4, 3)
    for number in range(2, 6):
        story.step(f"{number}.1").step(f"{number}.2").commit(str(number + 1))
    expected, mine = clean().told, story.told
    assert script.batches(expected, mine) == script.weights(expected, mine, explained=False) == []
    assert script.compared(expected, mine) == 6


def test_runs_are_compared_up_to_another_number_of_ranks() -> None:
    story = (
        disturbed()
        .step()
        .step()
        .commit()
        .rendezvous(4, 3, size=1)
        .step("other")
        .step("other")
        .commit("other")
    )
    expected, mine = clean().told, story.told
    assert script.batches(expected, mine) == script.weights(expected, mine, explained=False) == []
    assert script.compared(expected, mine) == 3


@pytest.mark.parametrize(("weights", "broken"), [("3", []), ("other", [rules.WEIGHTS])])
def test_with_virtual_ranks_commits_are_compared_on_any_number_of_ranks(
    weights: str, broken: list[Rule]
) -> None:
    told = (
        Story()
        .rendezvous(1, 0)
        .step()
        .commit(virtual=4)
        .step()
        .commit(virtual=4)
        .step()
        .commit(virtual=4)
        .told
    )
    resized = Story().rendezvous(1, 0).step().commit(virtual=4).rendezvous(2, 1, size=1).step("another share")
    resized = resized.commit(virtual=4).rendezvous(3, 2, 1, size=1).step().commit(weights, virtual=4)
    assert script.compared(told, resized.told) == 3
    assert [finding.rule for finding in script.weights(told, resized.told, explained=False)] == broken
    assert script.batches(told, resized.told) == []
    assert losses.compare(told, resized.told) == []
    assert losses.unproven(told, resized.told, ended=True) == ""


@pytest.mark.parametrize(
    "counts",
    [
        [(0, 1), (1, 1), (1, 1), (1, 0)],  # a commit at each batch, before its step
        [(6, 7), (7, 7), (7, 7), (1, 0)],  # at each seventh
    ],
)
def test_a_commit_before_the_step_is_found(counts: list[tuple[int, int]]) -> None:
    story = Story().rendezvous(1, 0)
    for steps, batches in counts:
        story.commit(steps=steps, batches=batches)
    (found,) = script.steps_before_commits(story.told)
    assert found.rule is rules.STEP_FIRST


@pytest.mark.parametrize(
    "counts",
    [
        [(7, 7), (7, 7), (3, 3)],
        [(2, 8), (2, 8), (1, 4)],  # gradients of four batches
        [(2, 8), (2, 6), (1, 4)],  # and a remainder
        [(0, 7), (0, 7), (0, 7)],  # steps can't be told
        [(7, 0), (7, 0), (7, 0)],  # batches are not recorded
    ],
)
def test_steps_that_come_first_are_right(counts: list[tuple[int, int]]) -> None:
    story = Story().rendezvous(1, 0)
    for steps, batches in counts:
        story.commit(steps=steps, batches=batches)
    assert script.steps_before_commits(story.told) == []
