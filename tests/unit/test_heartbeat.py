"""The page that a training process writes and its guardian reads."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdrecover import heartbeat
from hvdrecover.heartbeat import Page, Phase, Reading, Stop
from tests.fakes.clock import FakeClock
from tests.fakes.page import new_page


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    return new_page(monkeypatch)


@pytest.fixture
def time(page: Page, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    time = FakeClock()
    monkeypatch.setattr(heartbeat, "time", time)
    page.begin(Phase.STARTING)
    return time


@pytest.fixture
def shared() -> Iterator[int]:
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, heartbeat.SIZE)
    yield descriptor
    os.close(descriptor)


def test_one_process_writes_what_another_one_reads(shared: int) -> None:
    page = Page.from_buffer(mmap.mmap(shared, heartbeat.SIZE))
    page.begin(Phase.UNKNOWN)
    code = f"""
import os
from hvdrecover import heartbeat
heartbeat.attach({shared}, {shared})
heartbeat.page.rank = 5
heartbeat.committed(3, 12, 12)
heartbeat.committed(3, 13, 13)
for _ in range(4):
    heartbeat.recorded()
heartbeat.page.has_seen(1234.5)
with heartbeat.paused():
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], pass_fds=[shared], check=True, timeout=60)
    found = page.read()
    assert found == Reading(
        Phase.TRAINING,
        silent=found.silent,
        longest=1234.5,
        paused=True,
        commits=2,
        generation=3,
        commit=13,
        steps=4,
        rank=5,
        changed=13,
    )
    assert 0.0 <= found.silent < 60.0  # by a clock that both share


@pytest.mark.parametrize("phase", list(Phase))
def test_who_attaches_starts_unless_it_is_further(
    phase: Phase, page: Page, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guardians = Page.from_buffer(mmap.mmap(shared, heartbeat.SIZE))
    guardians.begin(phase)
    heartbeat.attach(shared, shared)
    assert heartbeat.watched()
    assert guardians.read().phase == (Phase.STARTING if phase in (Phase.UNKNOWN, Phase.READY) else phase)
    monkeypatch.undo()
    assert not heartbeat.watched()


@pytest.mark.parametrize(
    "progress",
    [
        heartbeat.heartbeat,
        heartbeat.stepped,
        heartbeat.recorded,
        lambda: heartbeat.committed(1, 2, 2),
        lambda: heartbeat.enter(Phase.RECOVERING),
        heartbeat.resume,
    ],
)
def test_each_sign_of_progress_ends_the_silence(progress, page: Page, time: FakeClock) -> None:
    heartbeat.committed(1, 1, 1)
    time.advance(40.0)
    assert page.read().silent == 40.0
    progress()
    assert page.read().silent == 0.0


def test_only_silences_in_training_count(page: Page, time: FakeClock) -> None:
    time.advance(100.0)
    heartbeat.heartbeat()  # before the first commit
    heartbeat.committed(1, 1, 1)
    heartbeat.enter(Phase.RECOVERING)
    time.advance(100.0)
    heartbeat.heartbeat()
    heartbeat.resume()
    heartbeat.committed(2, 1, 1)
    with heartbeat.paused():
        time.advance(100.0)
        heartbeat.heartbeat()
        time.advance(100.0)
    heartbeat.heartbeat()
    assert page.read().longest == 0.0
    time.advance(2.0)
    heartbeat.heartbeat()
    assert page.read().longest == 2.0


def test_the_longest_silence_of_a_beginning_counts_when_it_has_come_to_its_commit(
    page: Page, time: FakeClock
) -> None:
    for seconds in ((1.0, 30.0, 2.0), (3.0, 4.0)):
        heartbeat.resume()
        for each in seconds:
            assert page.read().longest == (30.0 if seconds[0] == 3.0 else 0.0)
            time.advance(each)
            heartbeat.heartbeat()
        time.advance(20.0)
        with heartbeat.paused():
            time.advance(500.0)
        heartbeat.heartbeat()
        heartbeat.committed(1, 1, 1)
    assert heartbeat.page.longest == 30.0


def test_who_was_asked_to_leave_with_all_is_not_asked_for_less(page: Page) -> None:
    for asked in (Stop.NO, Stop.HOST, Stop.JOB):
        page.ask(asked)
        assert page.read().stop == asked
    page.ask(Stop.HOST)
    assert page.read().stop == Stop.JOB


def test_ranks_wait_without_limit_unless_they_train_and_are_not_paused(page: Page) -> None:
    page.allow_stalls(7, 30)
    for phase in Phase:
        heartbeat.enter(phase)
        assert heartbeat.stall_seconds() == {Phase.TRAINING: 7, Phase.BEGINNING: 30}.get(phase, 0)
    with heartbeat.paused():
        pass
    assert page.read().waiting  # the others may still be in theirs
    heartbeat.heartbeat()
    assert not page.read().waiting


@pytest.mark.parametrize("progress", [heartbeat.stepped, heartbeat.recorded, heartbeat.heartbeat])
def test_a_callback_is_called_once_at_the_next_step_or_heartbeat(progress, page: Page) -> None:
    calls: list[str] = []
    heartbeat.at_progress(lambda: calls.append("a"))
    heartbeat.at_progress(lambda: calls.append("b"))
    heartbeat.enter(Phase.RECOVERING)
    heartbeat.resume()
    heartbeat.committed(1, 1, 1)  # as a script may before its first step
    assert calls == []
    progress()
    progress()
    assert calls == ["a", "b"]


@pytest.mark.parametrize("looks", [True, False])
def test_a_process_waits_until_its_guardian_has_looked_twice_but_not_for_ever(
    looks: bool, page: Page, time: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        time.advance(seconds)
        if looks:
            page.allow_stalls(7, 30)

    monkeypatch.setattr(time, "sleep", sleep, raising=False)
    monkeypatch.setattr(heartbeat, "_notes", 2)
    heartbeat.await_guardian()
    assert len(naps) == 2 if looks else sum(naps) < 10.0
