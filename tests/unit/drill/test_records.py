from __future__ import annotations

import pytest

from tests.unit.drill.lines import Story


@pytest.mark.parametrize(("again", "kept"), [(3, [1, 2, 3, 4]), (1, [1, 2, 3]), (0, [1, 2])])
def test_what_was_done_after_the_commit_that_a_later_rendezvous_continued_from_is_lost(
    again: int, kept: list[int]
) -> None:
    story = Story().rendezvous(1, 0).step().commit().step().commit().step().commit().step()
    records = story.rendezvous(2, again, 0).step().commit().records
    made = sorted({each.made for each in records.kept(records.commits)})
    assert made == kept[: len(made)] == list(range(1, again + 2))
    steps = records.of("step")
    lost = [each for each in steps if each not in records.kept(steps)]
    assert {each.commit for each in lost} == set(range(again, 4))


def test_steps_that_were_done_again_are_counted_once_for_all_ranks() -> None:
    story = Story().rendezvous(1, 0).step().commit().step().step()
    assert story.records.steps_repeated == 0
    assert story.rendezvous(2, 1, 0).step().step().records.steps_repeated == 2
