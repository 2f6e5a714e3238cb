from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.digest import Digest, digest
from hvdrecover.checkpoint.layout import TensorSpec, plan
from hvdrecover.checkpoint.near import digests
from hvdrecover.checkpoint.near.digests import Digests
from hvdrecover.checkpoint.niceness import BACKGROUND

PIECES = 8


class Watched(Digest):
    """A digest that notes which thread takes a piece in, and does something after so many."""

    threads: list[tuple[str, int]]
    then: dict[int, Any]

    def update(self, piece: Any) -> None:
        super().update(piece)
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.threads.append((threading.current_thread().name, niceness))
        self.then.pop(len(self.threads), lambda: None)()


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> dict[str, Arena]:
    monkeypatch.setattr(digests, "_PIECE", 1 << 12)
    monkeypatch.setattr(digests, "_WORTH_A_THREAD", 1 << 13)
    monkeypatch.setattr(digests, "_PATIENCE", 60.0)
    monkeypatch.setattr(digests, "Digest", Watched)
    Watched.threads, Watched.then = [], {}
    arena = Arena(plan([TensorSpec("w", "F64", ((PIECES - 1) << 9,))]))
    arena.bytes_of("w").view(np.float64)[...] = np.arange((PIECES - 1) << 9)
    return {"model": arena}


def names() -> list[str]:
    return [name for name, _ in Watched.threads]


MINE, PATIENT = threading.current_thread().name, "hvdrecover-near-digest"


def test_without_haste_training_goes_first(arenas: dict[str, Arena]) -> None:
    assert Digests(arenas).compute() == {"model": digest(arenas["model"].buffer)}
    assert names() == [PATIENT] * PIECES
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert {niceness for _, niceness in Watched.threads} == {max(BACKGROUND, mine)}


def test_in_haste_the_caller_continues_where_the_other_thread_is(arenas: dict[str, Arena]) -> None:
    mine = Digests(arenas)
    Watched.then[3] = mine.hurry
    assert mine.compute() == {"model": digest(arenas["model"].buffer)}
    assert names() == [PATIENT] * 3 + [MINE] * (PIECES - 3)


def test_patience_has_an_end(arenas: dict[str, Arena], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_PATIENCE", 0.0)
    mine, hurried = Digests(arenas), threading.Event()
    hurry = mine.hurry

    def noted() -> None:
        hurry()
        hurried.set()

    monkeypatch.setattr(mine, "hurry", noted)
    Watched.then[1] = lambda: hurried.wait(30)
    assert mine.compute() == {"model": digest(arenas["model"].buffer)}
    assert names().count(MINE) >= PIECES - 1


def test_what_is_hurried_before_it_begins_needs_no_other_thread(arenas: dict[str, Arena]) -> None:
    mine = Digests(arenas)
    mine.hurry()
    assert mine.compute() == {"model": digest(arenas["model"].buffer)}
    assert names() == [MINE] * PIECES


def test_the_commit_itself_ends_first_unless_there_is_haste(
    arenas: dict[str, Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    patient, waited = Digests(arenas), []
    monkeypatch.setattr(patient._haste, "wait", lambda seconds: waited.append((seconds, names())))
    assert patient.compute() is not None
    assert waited == [(digests._HEAD_START, [])]
    monkeypatch.setattr(digests, "_HEAD_START", 60.0)
    hasty, found = Digests(arenas), []
    thread = threading.Thread(target=lambda: found.append(hasty.compute()))
    thread.start()
    hasty.hurry()
    thread.join(30)
    assert found == [{"model": digest(arenas["model"].buffer)}]


@pytest.mark.parametrize("hurried", [False, True])
def test_cancelled_digests_come_to_an_end_at_once(arenas: dict[str, Arena], hurried: bool) -> None:
    mine = Digests(arenas)
    if hurried:
        mine.hurry()
    Watched.then[3] = mine.cancel
    assert mine.compute() is None
    assert len(names()) == 3
