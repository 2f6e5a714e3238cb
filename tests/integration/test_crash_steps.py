"""A writer is killed, or its machine loses power, at every single step of starting and writing a commit."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdrecover.checkpoint import CommitId
from tests.integration.crash_writer import (
    Child,
    Message,
    check_opens,
    check_start,
    make_commit,
    open_store,
    write_commits,
)
from tests.integration.system_calls import Disk, Step, Survives, Traced, When
from tests.unit.checkpoint.roots import Recorder

NBYTES = 20_000  # five pages: a write can break off between them
NEWEST = CommitId(1, 2)
LEFT = "g0001-c00000003"  # by a writer that was killed
LAST = CommitId(2, 4)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with as many commits as are kept, and what a writer that was killed has left."""
    root = tmp_path_factory.mktemp("prepared") / "root"
    store = open_store(root, Recorder())
    store.claim_next()
    for commit in (CommitId(1, 1), NEWEST):
        store.write(make_commit(commit, NBYTES), rank=0)
    (root / LEFT).mkdir()
    (root / LEFT / "model.safetensors").write_bytes(b"half")
    (root / "claims" / ".hvdrecover-0").write_bytes(b"half")
    return root


def start_and_write(root: Path, die_at: int | None, when: When, send: Callable[[Message], None]) -> None:
    Traced(root, lambda step: send(("step", step)), die_at, when).install()
    write_commits(root, NBYTES, send, count=2)


@pytest.fixture(scope="module")
def whole(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Step, CommitId]]:
    """All steps of an undisturbed run, each with the newest commit that was acknowledged before it."""
    root = tmp_path_factory.mktemp("whole") / "root"
    shutil.copytree(prepared, root)
    child = Child(start_and_write, root, None, "before")
    assert child.join() == 0
    newest, steps = NEWEST, []
    for kind, facts in child.heard:
        if kind == "durable":
            newest = CommitId(facts["generation"], facts["commit"])
        elif kind == "step":
            steps.append((facts, newest))
    assert newest == LAST
    disk = Disk(prepared)
    for step, _ in steps:
        disk.apply(step)
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    assert disk.content() == {name: path.read_bytes() for name, path in found.items()}  # no step was missed
    return steps


# A kill after a step is a kill before the next one.
@pytest.mark.parametrize("when", ["before", "middle"])
def test_killed_at_any_step_nothing_acknowledged_is_lost(
    prepared: Path, whole: list[tuple[Step, CommitId]], tmp_path: Path, when: When
) -> None:
    for number, (step, newest) in enumerate(whole):
        if when == "middle" and step.verb != "write":
            continue
        root = tmp_path / str(number)
        shutil.copytree(prepared, root)
        child = Child(start_and_write, root, number, when)
        assert child.join() < 0
        assert str(child.told("step")[-1]) == str(step)
        try:
            assert max([NEWEST, *child.acknowledged()]) == newest
            check_opens(root, newest)
            check_start(root, newest)
        except AssertionError as error:
            error.add_note(f"killed {when} step {number}: {step}")
            raise


def test_killed_at_any_step_on_a_fresh_root_a_later_start_can_use_it(tmp_path: Path) -> None:
    for number in itertools.count():
        root = tmp_path / str(number)
        child = Child(start_and_write, root, number, "before")
        ended = child.join() == 0
        try:
            check_start(root, max(child.acknowledged(), default=None))
        except AssertionError as error:
            error.add_note(f"killed before step {number} on a fresh root")
            raise
        if ended:
            break
    assert number > 20


@pytest.mark.parametrize(
    ("survives", "seed"), [("nothing", 0), ("names", 0), *(("some", seed) for seed in range(4))]
)
def test_when_the_power_fails_after_any_step_nothing_acknowledged_is_lost(
    prepared: Path, whole: list[tuple[Step, CommitId]], tmp_path: Path, survives: Survives, seed: int
) -> None:
    disk = Disk(prepared)
    dice = random.Random(seed)
    for number, (step, _) in enumerate(whole):
        disk.apply(step)
        newest = whole[min(number + 1, len(whole) - 1)][1]
        root = tmp_path / str(number)
        disk.power_fails(root, survives, dice)
        try:
            check_start(root, newest)
        except AssertionError as error:
            error.add_note(f"the power failed after step {number}: {step}; {survives} survived, seed {seed}")
            raise
