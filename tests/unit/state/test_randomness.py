from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdrecover.state import rank_local as streams
from hvdrecover.state.rank_local import stream
from hvdrecover.state.state import State
from tests.fakes.framework import FakeFramework, FakeGenerator, FakeLoader, FakeModel, FakeSampler
from tests.unit.state.jobs import URL, Process, on_ranks


def draws(generator: FakeGenerator, number: int = 3) -> list[int]:
    return [generator.draw() for _ in range(number)]


def test_a_stream_is_the_same_for_ever() -> None:
    assert stream(2**62, 10, 1)("torch") == 4034363443597322819


def test_at_the_boundary_of_epochs_a_resumed_run_draws_what_an_undisturbed_one_does(process: Process) -> None:
    state = process.state(sampler=FakeSampler(8))
    state.sync()
    loader = FakeLoader(state.sampler, 2, process.generator)
    state.sampler.order.record(8)
    state.commit()

    def next_epoch() -> list[int]:
        state.sampler.order.set_epoch(1)
        next(iter(loader))
        return draws(process.generator)

    undisturbed = next_epoch()
    state.restore()
    assert list(loader) == []  # a resumed script goes through the rest of epoch 0 first
    assert next_epoch() == undisturbed


def own_streams(process: Process) -> State:
    """A state that stores the user's own streams; each rank's is seeded with 100 plus its rank."""
    process.generator.state = 100 + process.world.rank()
    return process.state(URL, rng="store", model=FakeModel(w=0.0))


def own_draws(rank: int) -> list[int]:
    generator = FakeGenerator(100 + rank)
    draws(generator, 5)
    return draws(generator)


def test_ranks_get_their_streams_from_a_durable_commit_and_others_have_seeded_ones() -> None:
    def first(process: Process) -> None:
        state = own_streams(process)
        state.sync()
        draws(process.generator, 5)
        state.model.weights["w"] += 1.0
        state.commit()
        state.flush()

    def second(process: Process) -> list[int]:
        state = own_streams(process)
        process.generator.state = 0
        state.sync()
        return draws(process.generator)

    on_ranks(2, first)
    results = on_ranks(3, second)
    assert results[:2] == [own_draws(0), own_draws(1)]
    seed = FakeFramework(100).draw_seed()
    assert results[2] == draws(FakeGenerator(stream(seed, 1, 2)("fake")))


@pytest.fixture
def as_before() -> Iterator[None]:
    python, mine = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(mine)


@pytest.mark.parametrize("take", [streams.python_state, random.getstate])  # older commits have the latter
def test_a_generator_continues_where_it_was(as_before: None, take: Callable[[], Any]) -> None:
    random.gauss(0, 1)
    python, mine = take(), np.random.get_state(legacy=False)
    drawn = random.random(), np.random.normal()
    streams.set_python(python)
    streams.set_numpy(mine)
    assert (random.random(), np.random.normal()) == drawn


@pytest.mark.parametrize("place", [10**8, 625, -1, 2**70])
def test_a_place_beyond_the_buffer_is_refused_and_the_process_lives(place: int) -> None:
    script = f"""
import numpy as np
from hvdrecover.state import rank_local as streams
state = np.random.get_state(legacy=False)
state["state"]["pos"] = {place}
try:
    streams.set_numpy(state)
except ValueError as error:
    print(error)
np.random.random(2000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and re.fullmatch(f"numpy.* {place}\n", done.stdout)
