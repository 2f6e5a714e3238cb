"""Hooks of a state: a new one is a class and an entry in a tuple."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import HvdrecoverError, NumericsError, UnsupportedValueError
from hvdrecover.state.hooks import Agreement, Hook, Hooks, Moment, Table
from hvdrecover.state.memory import Memory
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.root import FakeRoot, FakeRoots
from tests.unit.state.jobs import URL, Process, on_ranks


@pytest.fixture
def root(roots: FakeRoots) -> FakeRoot:
    return roots[URL]


class Diary(Hook):
    """Writes down all that happens."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def attach(self) -> None:
        self.lines.append("attached")

    def observed(self, values: Any) -> None:
        self.lines.append(values)

    def begins(self) -> None:
        self.lines.append("begins")

    def captured(self, snapshot: Snapshot) -> None:
        self.lines.append(f"captured {snapshot.id.commit}")

    def committed(self) -> None:
        self.lines.append("committed")

    def agreed(self, agreement: Agreement) -> None:
        self.lines.append(agreement.source)

    def rolled_back(self) -> None:
        self.lines.append("rolled back")

    def closing(self) -> None:
        self.lines.append("closing")


class Count(Hook):
    """Counts what a script tells it to, and goes back with the job."""

    key = "count"

    def __init__(self) -> None:
        self.count = 0

    def capture(self) -> Json | None:
        return self.count or None

    def load(self, value: Json | None) -> None:
        self.count = value if isinstance(value, int) else 0

    def resumed(self, value: Json | None) -> Json | None:
        return value + 100 if isinstance(value, int) else value


class TooHotError(HvdrecoverError):
    pass


class Thermometer(Hook):
    """Ends the job when the ranks together are too hot, and keeps what a hot rank holds from the storage."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.degrees = 0
        self.looked = 0

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        return NumericsError([f"rank {self.rank} burns"], "Cool it.") if self.degrees > 90 else None

    def inspect(self, memory: Memory) -> bool:
        self.looked += 1
        return False

    def numbers(self, moment: Moment) -> Sequence[int]:
        return () if moment.kind == "rendezvous" else [self.degrees]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        return TooHotError(f"{table.sum()} degrees") if table.sum() > 100 else None


def test_one_that_looks_on_sees_all_that_happens(process: Process, root: FakeRoot) -> None:
    diary = Diary()
    state = process.state(URL, hooks=(diary,), step=0)
    state.sync()
    state.log_metrics(0.5, rate=1)
    state.commit()
    state.save()
    state.restore()
    state.finish()
    assert diary.lines == [
        "attached",
        "initial",
        {"loss": 0.5, "rate": 1},
        "begins",
        "captured 1",
        "committed",
        "captured 2",
        "rolled back",
        "closing",
        "captured 3",
    ]


def test_one_that_fails_is_left_out_with_a_word(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Diary):
        def begins(self) -> None:
            raise OSError("no ink")

    broken, sound = Broken(), Diary()
    state = process.state(hooks=(broken, sound), step=0)
    state.sync()
    for _ in range(3):
        state.commit()
    assert sound.lines.count("committed") == 3
    assert broken.lines == ["attached", "initial"]
    assert [record.message for record in caplog.records if "Broken" in record.message] == [
        "Broken fails and is left out from now on: OSError('no ink')"
    ]


def test_what_is_kept_is_part_of_commits_in_memory_and_on_storage(root: FakeRoot) -> None:
    def counting(process: Process) -> list[int]:
        count = Count()
        state = process.state(URL, hooks=(count,), step=0)
        state.sync()
        resumed = count.count
        count.count += 3
        state.commit(durable=True)
        state.flush()
        count.count = 77
        state.restore()
        return [resumed, count.count]

    assert on_ranks(2, counting) == [[0, 3]] * 2
    assert on_ranks(2, counting) == [[103, 106]] * 2


def test_a_vote_is_decided_by_all(root: FakeRoot) -> None:
    def measuring(process: Process) -> tuple[int, str, int]:
        thermometer = Thermometer(process.world.rank())
        state = process.state(hooks=(thermometer,), step=0)
        state.sync()
        with pytest.raises(TooHotError) as caught:
            while True:
                thermometer.degrees += 10 + process.world.rank()
                state.commit()
        return thermometer.looked, str(caught.value), state.last_commit.commit

    assert on_ranks(2, measuring) == [(5, "105 degrees", 5)] * 2


def test_ranks_whose_commit_fails_raise_what_all_have_decided_at_it() -> None:
    def measuring(process: Process) -> str:
        thermometer = Thermometer(process.world.rank())
        state = process.state(hooks=(thermometer,), box=None)
        state.sync()
        state.box, thermometer.degrees = object(), 60
        with pytest.raises(TooHotError) as caught:
            state.commit()
        return str(caught.value)

    assert on_ranks(2, measuring) == ["120 degrees"] * 2


@pytest.mark.parametrize("returns", [False, True])
def test_a_rank_whose_commit_failed_alone_takes_part_in_the_next_check(returns: bool) -> None:
    def measuring(process: Process) -> str:
        thermometer = Thermometer(process.world.rank())
        state = process.state(hooks=(thermometer,), box=None)

        def train(state: State) -> str:
            state.box = object() if process.world.rank() == 1 else None
            failure: AbstractContextManager[object] = nullcontext()
            if state.box is not None:
                failure = pytest.raises(UnsupportedValueError)
            with failure:
                state.commit()
            state.box, thermometer.degrees = None, 60
            if returns:
                return "returned"
            with pytest.raises(TooHotError) as caught:
                state.check_host_updates()
            thermometer.degrees = 0
            return str(caught.value)

        return str(run(train)(state))

    assert on_ranks(2, measuring) == ["returned" if returns else "120 degrees"] * 2


def test_a_rank_that_objects_passes_a_commit_over_and_makes_none_durable(root: FakeRoot) -> None:
    def burning(process: Process) -> tuple[int, str]:
        thermometer = Thermometer(process.world.rank())
        state = process.state(URL, hooks=(thermometer,), step=0)
        state.sync()
        thermometer.degrees = 95 if process.world.rank() == 0 else 0
        state.commit()
        last = state.last_commit.commit
        state.save()
        with pytest.raises(HvdrecoverError) as caught:
            state.finish()
        return last, str(caught.value)

    (passed_over, reason), (other, _) = on_ranks(2, burning)
    assert (passed_over, other) == (0, 1)
    assert "rank 0 burns" in reason
    assert root.commits() == []


def test_of_several_verdicts_the_first_one_counts_and_all_hooks_hear() -> None:
    class Strict(Hook):
        def __init__(self, word: str) -> None:
            self.word = word
            self.heard = 0

        def verdict(self, moment: Moment, table: Table) -> BaseException | None:
            self.heard += 1
            return TooHotError(self.word) if self.word else None

    voters = (Strict(""), Strict("first"), Strict("second"))

    def body(process: Process) -> str:
        hooks, moment = Hooks(voters), Moment("check")
        return str(hooks.verdict(moment, hooks.send(process.world, moment)()[1:]))

    assert on_ranks(1, body) == ["first"]
    assert [each.heard for each in voters] == [1, 1, 1]
