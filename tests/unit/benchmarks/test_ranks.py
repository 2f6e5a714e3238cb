"""Ranks that are made up say what real ones would."""

from __future__ import annotations

from benchmarks.scale import ranks
from benchmarks.scale.simulated import Simulated


def test_a_commit_among_simulated_ranks_holds_the_own_states_of_each() -> None:
    state = ranks._state(Simulated(8, ranks._other), rng="store", own=True)
    state.sync()
    state.batch += 1
    state.commit()
    newest = state._session.memory.newest
    assert newest is not None
    assert len(newest.arenas["loss"].layout.specs) == 8
    assert sorted(newest.state["random"]["states"]) == [str(rank) for rank in range(8)]
