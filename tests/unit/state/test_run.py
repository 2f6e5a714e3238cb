"""The loop around a training function."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.config import PREEMPTED, Config
from hvdrecover.errors import (
    RecoveryError,
    RemovedError,
    RendezvousError,
    StorageError,
)
from hvdrecover.heartbeat import Page, Phase
from hvdrecover.state.durable import FINISH_ATTEMPTS
from hvdrecover.state.leaving import Preempted
from hvdrecover.state.rendezvous import RENDEZVOUS
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeSampler
from tests.fakes.root import FakeRoots
from tests.fakes.world import (
    FakeJob,
    Fault,
    Outcome,
    change_at,
    fail_at,
)
from tests.unit.state.jobs import CONFIG, STATIC, URL, Process, initialised


@dataclass(frozen=True)
class Entry:
    """The things that a rank saw when its training function was called."""

    newcomer: bool
    rank: int
    size: int
    step: int
    weight: float
    place: tuple[int, int]


@dataclass
class Counting:
    """A script whose weight, counter, list and cursor must never tell different numbers of steps.

    Attributes:
        commit_every: steps from one commit to the next.
        check: whether to look at the hosts after each step.
        flush: whether each commit is to be durable before training continues.
        config: of each process.
        entries: what ranks saw when their training functions were called.
        states: the states that were made, in no particular order.
    """

    checkpoint: Checkpoint | str | None = None
    steps: int = 6
    commit_every: int = 2
    check: bool = False
    flush: bool = False
    at_step: Callable[[Process, State], None] | None = None
    config: Config = CONFIG
    entries: list[Entry] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def run(self, size: int, *faults: Fault) -> list[Outcome]:
        return FakeJob(initialised(self._script), size, faults).run()

    def results(self, size: int, *faults: Fault) -> list[Any]:
        return FakeJob(initialised(self._script), size, faults).results()

    def _script(self, process: Process) -> Any:
        state = process.state(
            self.checkpoint,
            config=self.config,
            model=FakeModel(w=0.0),
            sampler=FakeSampler(1000),
            step=0,
            history=[],
        )
        self.states.append(state)
        result = run(lambda state: self._train(process, state))(state)
        return result, state.step, float(state.model.weights["w"])

    def _train(self, process: Process, state: State) -> str:
        world, order = process.world, state.sampler.order
        weight = float(state.model.weights["w"])
        self.entries.append(
            Entry(world.newcomer, world.rank(), world.size(), state.step, weight, (order.rank, order.size))
        )
        while state.step < self.steps:
            self._step(process, state)
        return "trained"

    def _step(self, process: Process, state: State) -> None:
        mean = process.world.allreduce(np.ones(1)) / process.world.size()
        state.model.weights["w"] += mean[0]
        state.step += 1
        state.history.append(state.step)
        assert state.model.weights["w"] == state.step == len(state.history)
        if self.at_step is not None:
            self.at_step(process, state)
        if state.step % self.commit_every == 0:
            state.commit()
            if self.flush:
                state.flush()
        elif self.check:
            state.check_host_updates()


def entered(counting: Counting) -> list[tuple[int, int, int]]:
    """Rank, size and step of all calls, without repetition."""
    return sorted({(entry.step, entry.rank, entry.size) for entry in counting.entries})


# -- lost ranks --------------------------------------------------------------------------------------------


def test_the_memory_of_an_interrupted_step_is_let_go_before_the_ranks_agree() -> None:
    interrupted: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def body(process: Process) -> None:
        state = process.state(model=FakeModel(w=0.0), step=0)
        state.register_reset_callbacks([lambda: alive.append(interrupted[0]() is not None)])

        def train(state: State) -> None:
            while state.step < 4:
                activations = np.ones(1)
                if process.world.rank() == 0:
                    interrupted[:] = [weakref.ref(activations)]
                process.world.allreduce(activations)
                state.step += 1
                state.commit()

        run(train)(state)

    FakeJob(initialised(body), 2, [fail_at(1, "gradient", 3)]).results()
    assert alive == [False]


class Adjusting(State):
    """Has a method that changes a weight after ours."""

    def __init__(self, process: Process, method: str) -> None:
        self._method = method
        attributes = {"model": FakeModel(w=0.0), "step": 0}
        super().__init__(process.framework, process.world, config=CONFIG, attributes=attributes)

    def _adjust(self, method: str) -> None:
        if method == self._method:
            self.model.weights["w"][...] = 9.0

    def restore(self) -> None:
        super().restore()
        self._adjust("restore")

    def on_reset(self) -> None:
        super().on_reset()
        self._adjust("on_reset")


def count(process: Process, state: State) -> None:
    """Do a step: one more in the weight, too."""
    process.world.allreduce(np.zeros(1))
    state.model.weights["w"] += 1
    state.step += 1
    state.commit()


def resumed_from(make: Callable[[Process], State]) -> dict[bool, tuple[float, bool]]:
    """Lose one of two ranks, which is restarted.

    Returns:
        By whether a rank is the survivor: the weight that it goes on with, and whether its commit has the
        digests that were taken before the ranks agreed, so that it is no new copy.
    """
    found: dict[bool, tuple[float, bool]] = {}

    def body(process: Process) -> None:
        state, begun = make(process), []

        def train(state: State) -> None:
            newest = state._session.memory.newest
            assert newest is not None
            if newest.id.generation > 1:
                found[bool(begun)] = float(state.model.weights["w"]), newest.digests is not None
            begun.append(newest.id)
            while state.step < 4:
                count(process, state)

        run(train)(state)

    FakeJob(initialised(body), 2, [fail_at(1, "gradient", 3, replacement="in_place")]).results()
    return found


def with_callback(process: Process) -> State:
    state = process.state(model=FakeModel(w=0.0), step=0)
    state.register_reset_callbacks([lambda: state.model.weights["w"].fill(9.0)])
    return state


def test_a_survivor_sends_the_very_commit_that_it_holds() -> None:
    found = resumed_from(lambda process: process.state(model=FakeModel(w=0.0), step=0))
    assert found[True] == (2.0, True)
    assert found[False][0] == 2.0


def with_a_method_of_its_own(process: Process) -> State:
    state = process.state(model=FakeModel(w=0.0), step=0)
    on_reset = state.on_reset

    def adjust() -> None:
        on_reset()
        state.model.weights["w"].fill(9.0)

    vars(state)["on_reset"] = adjust
    return state


@pytest.mark.parametrize(
    "make",
    [
        with_callback,
        with_a_method_of_its_own,
        lambda process: Adjusting(process, "restore"),
        lambda process: Adjusting(process, "on_reset"),
    ],
    ids=["callback", "instance", "restore", "on_reset"],
)
def test_what_a_script_has_changed_after_a_rollback_is_sent_as_well(make: Callable[[Process], State]) -> None:
    found = resumed_from(make)
    assert (found[True], found[False][0]) == ((9.0, False), 9.0)


# -- hosts that come and go --------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_when_hosts_come_nothing_is_rolled_back(check: bool) -> None:
    counting = Counting(check=check)
    step = 3 if check else 4
    assert counting.results(2, change_at(1, "gradient", step, add=1)) == [("trained", 6, 6.0)] * 3
    assert entered(counting)[2:] == [(step, rank, 3) for rank in range(3)]


def test_an_interrupt_between_commits_never_mixes_old_counters_with_new_weights() -> None:
    counting = Counting(check=True, commit_every=4)
    faults = [
        change_at(0, "gradient", 1, add=1),
        change_at(1, "gradient", 3, remove=[0]),
        fail_at(0, "gradient", 4),  # before the next commit, so back to what the interrupt has kept
    ]
    counting.run(2, *faults)
    assert all(entry.weight == entry.step for entry in counting.entries)
    assert entered(counting)[2:] == [(1, 0, 3), (1, 1, 3), (1, 2, 3), (3, 0, 1), (3, 0, 2), (3, 1, 2)]


def test_a_static_job_does_not_look_at_hosts(process: Process) -> None:
    state = process.state(config=STATIC)
    state.on_hosts_updated(0.0, 2)
    state.check_host_updates()
    state.commit()
    assert process.world.visits == 2  # its ranks ask each other for other things


# -- the whole job started again ---------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("replacement", ["none", "in_place"])
def test_a_rank_lost_at_the_finish_is_survived(rank: int, replacement: str, roots: FakeRoots) -> None:
    counting = Counting(URL)
    fault = fail_at(rank, "hvdrecover.finish", replacement=replacement)  # type: ignore[arg-type]
    survivors = [result for result in counting.results(2, fault) if result[0] is not None]
    assert survivors == [("trained", 6, 6.0)]
    assert len(counting.entries) == 2  # nobody trains again
    assert roots[URL].commits()[-1] == CommitId(2, 4)
    assert Counting(URL).results(1) == [(None, 6, 6.0)]


def test_an_end_that_can_not_be_written_is_an_error_on_all_ranks(roots: FakeRoots) -> None:
    def break_the_disk(process: Process, state: State) -> None:
        if state.step == 6:
            roots[URL].failures = math.inf

    outcomes = Counting(URL, commit_every=100, at_step=break_the_disk).run(2)
    errors = [outcome.error for outcome in sorted(outcomes, key=lambda outcome: outcome.world.place)]
    assert isinstance(errors[0], StorageError)
    assert isinstance(errors[1], RecoveryError)
    assert roots[URL].attempts >= FINISH_ATTEMPTS
    assert roots[URL].commits() == []
    roots[URL].failures = 0  # the writer is still at it; it ends with this


@pytest.mark.parametrize(("claimed", "fails"), [(URL, True), ("fake://another", False), (None, False)])
def test_a_root_that_the_job_has_claimed_must_hold_its_claim(
    process: Process, claimed: str | None, fails: bool
) -> None:
    process.clock.impatient = True
    state = process.state(URL, config=dataclasses.replace(CONFIG, claimed=claimed), step=0)
    with pytest.raises(StorageError, match="claims/ ") if fails else nullcontext():
        state.sync()


def test_ranks_at_states_with_different_roots_start_again_together() -> None:
    def body(process: Process) -> None:
        state = process.state(f"fake://fold-{process.world.rank()}", step=0)
        run(lambda state: None)(state)

    for outcome in FakeJob(initialised(body), 2).run():
        assert isinstance(outcome.error, RecoveryError)
        assert "at checkpoint root 'fake://fold-" in str(outcome.error)


# -- who writes --------------------------------------------------------------------------------------------


def test_a_rank_that_is_no_longer_rank_0_stops_writing(roots: FakeRoots) -> None:
    counting = Counting(URL, flush=True)
    counting.run(1, change_at(0, "gradient", 2, add=1, ahead=True))
    old, new = sorted(counting.states, key=lambda state: -state._session.context.world.rank())
    assert old._session.durable._writer is None
    assert (old.last_durable, new.last_durable) == (None, CommitId(2, 5))
    ours = [commit for commit in roots[URL].published if commit.generation == 2]
    assert ours == [CommitId(2, 3), CommitId(2, 4), CommitId(2, 5)]


# -- errors of the user's own ------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def test_an_error_of_the_user_passes_unchanged(process: Process) -> None:
    error = OwnError("mine")

    @run
    def train(state: State) -> None:
        raise error

    with pytest.raises(OwnError) as caught:
        train(process.state())
    assert caught.value is error
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_from_the_keyboard_passes(process: Process, kind: type[BaseException]) -> None:
    calls = []

    @run
    def train(state: State) -> None:
        calls.append(1)
        raise kind

    with pytest.raises(kind):
        train(process.state(URL))
    assert calls == [1]


def test_a_static_job_can_not_continue_without_a_rank(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC")
    lost = HorovodInternalError("a rank was lost")

    @run
    def train(state: State) -> None:
        raise lost

    with pytest.raises(HorovodInternalError) as caught:
        train(process.state(config=STATIC))
    assert caught.value is lost
    assert process.world.rendezvouses == 1


def train_once_lost(process: Process, refusals: list[RecoveryError]) -> list[int]:
    """Lose a rank, and fail at a rendezvous as often as there are refusals; the step at each call."""
    rendezvous, calls, state = process.world.init, [], process.state(step=0)

    def refuse() -> None:
        if refusals:
            raise refusals.pop(0)
        rendezvous()

    @run
    def train(state: State) -> None:
        calls.append(state.step)
        state.step = 1
        if len(calls) == 1:
            state.commit()
            state.step = 2
            process.world.init = refuse  # type: ignore[method-assign]
            raise HorovodInternalError("a rank was lost")

    train(state)
    return calls


def test_a_rendezvous_that_fails_is_tried_again(process: Process) -> None:
    assert train_once_lost(process, [RendezvousError("lost at the rendezvous")] * (RENDEZVOUS - 1)) == [0, 1]
    assert process.world.rendezvouses == 2


def test_a_rank_without_another_rendezvous_says_so(process: Process) -> None:
    refusals: list[RecoveryError] = [RendezvousError(f"refusal {number}") for number in range(RENDEZVOUS + 1)]
    with pytest.raises(RendezvousError, match=f"refusal {RENDEZVOUS - 1}"):
        train_once_lost(process, refusals)
    assert len(refusals) == 1


def test_a_rank_that_was_taken_out_leaves_at_once(
    process: Process, page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    refusals: list[RecoveryError] = [RemovedError("h1 has been removed"), RendezvousError("asked again")]
    with pytest.raises(Preempted) as caught:
        train_once_lost(process, refusals)
    assert caught.value.code == PREEMPTED
    assert len(refusals) == 1
    assert page.read().phase == Phase.REMOVED
    assert "h1 has been removed; this process leaves" in caplog.messages
