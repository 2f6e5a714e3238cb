"""The messages about collectives that wait."""

from __future__ import annotations

from hvdrecover.launch.stacks import Stall


def test_tensors_ranks_and_places_are_in_one_message() -> None:
    stall = Stall({1: ["a"], 3: ["b", "c", "d", "e", "f"]}, 12.4)
    assert not stall.complete
    stall.places[1] = "rank 1 on h, which is at train.py:7 in load"
    assert not stall.complete
    stall.places[3] = "rank 3 on i, which does not answer"
    assert stall.complete
    assert stall.message() == (
        "a has waited 12 s for rank 1 on h, which is at train.py:7 in load; "
        "b, c, d and 2 more have waited 12 s for rank 3 on i, which does not answer"
    )


def test_a_rank_of_which_nobody_tells_is_named_all_the_same() -> None:
    assert Stall({2: ["a", "b"]}, 3.0).message() == "a, b have waited 3 s for rank 2"


def test_ranks_that_are_known_to_be_at_something_long_are_nobodys_fault() -> None:
    assert Stall({0: ["a"]}, 3.0, {0: None}).message() == ""
    assert Stall({0: ["a"], 1: ["b"]}, 3.0, {0: None}).message() == "b has waited 3 s for rank 1"
