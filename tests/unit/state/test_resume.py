"""A plain loop, with `State.resume` and `State.finish`."""

from __future__ import annotations

import re

import pytest

from hvdrecover.errors import ConfigError, StateError
from hvdrecover.guard import Guard
from hvdrecover.heartbeat import Page, Phase
from hvdrecover.state.run import run
from tests.fakes.framework import FakeSampler
from tests.unit.state.jobs import URL, Process


def test_the_guardian_knows_that_the_process_does_not_survive_others(process: Process, page: Page) -> None:
    state = process.state(URL, step=0)
    page.phase = Phase.PLAIN
    state.resume()
    assert (page.phase, page.in_run) == (Phase.BEGINNING, 0)
    state.finish()
    assert page.phase == Phase.FINISHED


def test_a_call_at_the_wrong_place_is_an_error_that_says_so(process: Process) -> None:
    state = process.state(URL, step=0)
    for early in (state.commit, state.finish):
        with pytest.raises(StateError, match=re.escape("state.resume() first")):
            early()
    state.resume()
    with pytest.raises(StateError, match="Call it once"):
        state.resume()
    with pytest.raises(StateError, match="remove that"):
        run(lambda state: None)(state)


def test_resume_in_a_training_function_is_an_error(process: Process) -> None:
    with pytest.raises(StateError, match="without @run"):
        run(lambda state: state.resume())(process.state(URL, step=0))


def test_a_guard_that_rolls_back_needs_a_training_function(process: Process) -> None:
    with pytest.raises(ConfigError, match="go back"):
        process.state(URL, guard=Guard(numerics="rollback"), sampler=FakeSampler(4)).resume()
