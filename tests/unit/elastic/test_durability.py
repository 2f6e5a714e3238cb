"""When commits become durable, and what training notices of it."""

from __future__ import annotations

import threading

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.retrying import ATTEMPTS
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.store import Store
from hvdrecover.elastic.state import State
from hvdrecover.errors import FencedError, FlushTimeoutError, ForeignRootError, StorageError
from hvdrecover.events import Events
from tests.fakes.clock import FakeClock
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoot, FakeRoots
from tests.fakes.world import HANG_SECONDS
from tests.unit.elastic.jobs import STATIC, URL, Process, on_ranks


@pytest.fixture
def root(roots: FakeRoots) -> FakeRoot:
    return roots[URL]


def begun(process: Process, **settings: object) -> State:
    """A state with one weight that has met the others and writes to the root."""
    state = process.state(Checkpoint(URL, **settings), model=FakeModel(w=[0.0]))  # type: ignore[arg-type]
    state.sync()
    return state


def train(state: State) -> None:
    state.model.weights["w"] += 1


def commit_and_settle(state: State) -> None:
    """A commit whose write, if it began one, has ended."""
    train(state)
    state.commit()
    assert state._durability is not None
    state._durability.writer.wait()


def store_of(roots: FakeRoots) -> Store:
    clock = FakeClock()
    events = Events(None, "host", clock)
    return Store(roots.open(URL), keep=3, job="another", host="host", events=events, clock=clock)


def weight_in(roots: FakeRoots, commit: CommitId) -> float:
    """The weight that a durable commit holds; raises if a byte of the commit does not verify."""
    arena = read_commit(store_of(roots).storage, commit).arenas["model"]
    return float(arena.bytes_of("w").view("f8")[0])


def block(root: FakeRoot) -> None:
    """Let the next write begin and not end."""
    root.gate.clear()


def wait_until_blocked(root: FakeRoot) -> None:
    assert root.at_the_gate.wait(HANG_SECONDS)


def test_every_commit_is_due_by_default(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    for _ in range(3):
        commit_and_settle(state)
    assert root.published == [CommitId(1, 1), CommitId(1, 2), CommitId(1, 3)]


def test_the_initial_state_is_not_written(process: Process, root: FakeRoot) -> None:
    begun(process)
    assert root.commits() == []
    assert root.claims() == ["claims/g0001.json"]


def test_every_nth_commit(process: Process, root: FakeRoot) -> None:
    state = begun(process, every_commits=3)
    for _ in range(7):
        commit_and_settle(state)
    assert [commit.commit for commit in root.published] == [3, 6]


def test_by_time(process: Process, root: FakeRoot) -> None:
    state = begun(process, every_seconds=60)
    for _ in range(6):
        process.clock.seconds += 25
        commit_and_settle(state)
    assert [commit.commit for commit in root.published] == [1, 4]


def test_by_number_or_time_whichever_is_first(process: Process, root: FakeRoot) -> None:
    state = begun(process, every_commits=4, every_seconds=60)
    for seconds in (0, 0, 0, 60, 0, 0, 0, 0):
        process.clock.seconds += seconds
        commit_and_settle(state)
    assert [commit.commit for commit in root.published] == [1, 4, 8]


def test_only_what_retention_keeps_is_kept(process: Process, root: FakeRoot) -> None:
    state = begun(process, keep=2)
    for _ in range(4):
        commit_and_settle(state)
    assert root.commits() == [CommitId(1, 3), CommitId(1, 4)]


def test_a_save_is_never_written(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    state.save()
    assert root.attempts == 0


def test_only_rank_0_writes(root: FakeRoot) -> None:
    def body(process: Process) -> CommitId | None:
        state = begun(process)
        state.commit(durable=True)
        state.flush()
        return state.last_durable

    assert on_ranks(3, body) == [CommitId(1, 1), None, None]
    assert root.published == [CommitId(1, 1)]


def test_a_commit_made_while_a_write_is_in_flight_stays_in_memory(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    block(root)
    train(state)
    state.commit()
    wait_until_blocked(root)
    for _ in range(3):
        train(state)
        state.commit()
    root.gate.set()
    state._durability.writer.wait()  # type: ignore[union-attr]
    commit_and_settle(state)
    assert [commit.commit for commit in root.published] == [1, 5]


def test_the_bytes_of_the_snapshot_in_flight_never_change(
    process: Process, root: FakeRoot, roots: FakeRoots
) -> None:
    state = begun(process)
    block(root)
    train(state)
    state.commit()
    wait_until_blocked(root)
    assert state._durability is not None
    in_flight = state._durability.writer.in_flight
    assert in_flight is not None
    before = (in_flight.arenas["model"].buffer.tobytes(), str(in_flight.state))
    for _ in range(4):  # more often than there are arenas
        train(state)
        state.commit()
        state.restore()
    state.sync()
    assert (in_flight.arenas["model"].buffer.tobytes(), str(in_flight.state)) == before
    root.gate.set()
    state._durability.writer.wait()
    assert weight_in(roots, CommitId(1, 1)) == 1.0


def test_every_write_holds_its_own_commit_whatever_training_does_meanwhile(
    process: Process, root: FakeRoot, roots: FakeRoots
) -> None:
    state = begun(process, keep=100)
    for number in range(1, 30):
        if number % 3 == 0:
            block(root)
        train(state)
        state.commit()
        if number % 3 == 2:
            root.gate.set()
    root.gate.set()
    state.flush()
    assert CommitId(1, 29) in root.commits()
    for commit in root.commits():
        assert weight_in(roots, commit) == commit.commit


def test_memory_holds_at_most_two_snapshots(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    arenas = set()
    for number in range(12):
        if number % 2:
            block(root)
        state.commit()
        root.gate.set()
        assert state._memory.newest is not None
        arenas.add(id(state._memory.newest.arenas["model"]))
    assert len(arenas) <= 2


def test_a_commit_that_is_asked_to_be_durable_is(process: Process, root: FakeRoot) -> None:
    state = begun(process, every_commits=100)
    state.commit()
    state.commit(durable=True)
    state.flush()
    assert root.published == [CommitId(1, 2)]
    assert state.last_durable == CommitId(1, 2)


def test_a_commit_that_is_asked_to_be_durable_waits_for_the_write_in_flight(
    process: Process, root: FakeRoot
) -> None:
    state = begun(process)
    block(root)
    state.commit()
    wait_until_blocked(root)
    training = threading.Thread(target=state.commit, args=(True,))
    training.start()
    root.gate.set()
    training.join(HANG_SECONDS)
    state.flush()
    assert root.published == [CommitId(1, 1), CommitId(1, 2)]


def test_flush_makes_the_newest_commit_durable_though_none_was_due(process: Process, root: FakeRoot) -> None:
    state = begun(process, every_commits=100)
    state.commit()
    state.flush()
    state.flush()
    assert root.published == [CommitId(1, 1)]


def test_flush_waits_for_a_write_that_is_in_flight_already(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    state.commit()
    state.flush()
    assert state.last_durable == CommitId(1, 1)
    assert root.attempts == 1


def test_flush_gives_up_after_its_timeout_and_the_write_goes_on(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    block(root)
    state.commit()
    with pytest.raises(FlushTimeoutError, match=r"g0001-c00000001 is not durable after 0"):
        state.flush(timeout=0)
    assert root.published == []
    root.gate.set()
    state.flush()
    assert root.published == [CommitId(1, 1)]


def test_flush_with_a_timeout_gives_up_on_an_earlier_write_too(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    block(root)
    state.commit()
    state.commit()
    with pytest.raises(FlushTimeoutError):
        state.flush(timeout=0)
    root.gate.set()
    state.flush()
    assert root.published == [CommitId(1, 1), CommitId(1, 2)]


def test_a_write_that_fails_is_tried_again(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    root.failures = ATTEMPTS - 1
    state.commit()
    state.flush()
    assert root.published == [CommitId(1, 1)]
    assert process.clock.seconds > 1000  # it waited in between


def test_a_write_that_never_succeeds_breaks_no_commit_and_is_raised_by_flush(
    process: Process, root: FakeRoot
) -> None:
    state = begun(process)
    commit_and_settle(state)
    root.failures = 3 * ATTEMPTS
    for _ in range(2):
        state.commit(durable=True)
    with pytest.raises(StorageError, match="the disk is full"):
        state.flush()
    assert root.published == [CommitId(1, 1)]
    assert state.last_commit == CommitId(1, 3)


def test_a_later_commit_makes_up_for_one_that_could_not_be_written(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    root.failures = ATTEMPTS
    state.commit(durable=True)
    state.commit(durable=True)
    state.flush()
    assert root.published == [CommitId(1, 2)]


def test_flush_tries_a_commit_again_that_could_not_be_written(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    root.failures = ATTEMPTS
    state.commit()
    with pytest.raises(StorageError):
        state._durability.writer.wait()  # type: ignore[union-attr]
    state.flush()
    assert root.published == [CommitId(1, 1)]


def test_a_job_that_was_replaced_is_stopped_at_the_commit_after_its_write(
    process: Process, root: FakeRoot, roots: FakeRoots
) -> None:
    state = begun(process)
    commit_and_settle(state)
    assert store_of(roots).claim_next() == 2
    state.commit()
    assert state._durability is not None
    with pytest.raises(FencedError):
        state._durability.writer.wait()
    with pytest.raises(FencedError, match="generation 2 has claimed"):
        state.commit()
    assert root.published == [CommitId(1, 1)]


def test_a_job_that_was_replaced_is_told_by_flush(process: Process, roots: FakeRoots) -> None:
    state = begun(process)
    store_of(roots).claim_next()
    state.commit()
    with pytest.raises(FencedError):
        state.flush()
    with pytest.raises(FencedError):
        state.flush()


def test_a_root_with_files_of_somebody_else_is_left_alone(process: Process, root: FakeRoot) -> None:
    root.files["thesis.tex"] = b"all of it"
    with pytest.raises(ForeignRootError, match=r"thesis\.tex"):
        begun(process)
    assert root.files == {"thesis.tex": b"all of it"}


def test_the_manifest_tells_who_wrote_it_and_how_many_ranks_there_were(roots: FakeRoots) -> None:
    def body(process: Process) -> None:
        state = begun(process)
        state.commit()
        state.flush()

    on_ranks(2, body)
    snapshot = read_commit(store_of(roots).storage, CommitId(1, 1))
    assert snapshot.world_size == 2
    assert snapshot.versions["fake"] == "1.0"
    assert not snapshot.finished


def test_a_static_job_writes_the_same(process: Process, root: FakeRoot) -> None:
    state = process.state(URL, config=STATIC, epoch=0)
    state.sync()
    state.commit()
    state.flush()
    assert root.published == [CommitId(1, 1)]


def test_settling_waits_for_the_write_in_flight_and_raises_nothing(process: Process, root: FakeRoot) -> None:
    state = begun(process)
    root.failures = 1
    state.commit()
    state.settle()
    assert state._durability is not None
    assert state._durability.writer.in_flight is None
