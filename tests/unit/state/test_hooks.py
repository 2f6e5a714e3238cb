"""Hooks of a state: a new one is a class and an entry in a tuple."""

from __future__ import annotations

import pytest

from hvdrecover.errors import HvdrecoverError, NumericsError
from hvdrecover.state.hooks import Agreement, Hook
from tests.fakes.root import FakeRoot
from tests.unit.state.jobs import URL, Process, on_ranks


class Diary(Hook):
    """Writes down what happens."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def committed(self) -> None:
        self.lines.append("committed")

    def agreed(self, agreement: Agreement) -> None:
        self.lines.append(agreement.source)


class Thermometer(Hook):
    """Keeps what a hot rank holds from the storage."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.degrees = 0

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        return NumericsError([f"rank {self.rank} burns"], "Cool it.") if self.degrees > 90 else None


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
    assert broken.lines == ["initial"]
    assert [record.message for record in caplog.records if "Broken" in record.message] == [
        "Broken fails and is left out from now on: OSError('no ink')"
    ]


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
