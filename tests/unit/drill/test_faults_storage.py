from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.drill import storage
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.storage import Mood
from tests.unit.drill.drilled import Counting


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path, stack)


@pytest.mark.parametrize(
    ("name", "mood"),
    [
        ("storage-away", Mood(away=True)),
        ("disk-full", Mood(full=True)),
        ("storage-slow", Mood(slow=0.5)),
        ("storage-flaky", Mood(flaky=0.05)),
    ],
)
def test_the_storage_is_as_the_fault_says_and_then_as_it_was(run: Counting, name: str, mood: Mood) -> None:
    fault = FAULTS[name]
    fault.strike(run, 0)
    assert storage.mood(run.root) == mood
    fault.end(run)
    assert storage.mood(run.root) == Mood()
    assert fault.options(run) == ["--checkpoint", f"hvdrecover-drill://{run.root}"]


def test_faults_of_the_storage_may_be_under_way_at_once(run: Counting) -> None:
    FAULTS["disk-full"].strike(run, 0)
    FAULTS["storage-slow"].strike(run, 0)
    FAULTS["disk-full"].end(run)
    assert storage.mood(run.root) == Mood(slow=0.5)
