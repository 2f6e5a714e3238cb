"""Random faults, one after the other, in one run: nothing is lost, nothing is left over, nothing grows."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from tests.integration.conftest import LONG, Start
from tests.integration.faults import PATIENT, FaultyRun, wait_until_all_train
from tests.support.jobs import (
    DRIVER,
    GUARDIAN,
    PATIENCE,
    PREEMPTED,
    STANDBY,
    TRAINING_SAMPLES,
    Job,
    kill,
    running,
)
from tests.waiting import wait_until

ENDLESS = 10_000  # epochs; the run ends when the faults have
FAULTS = ("kill a guardian", "kill both", "preempt", "kill rank 0", "stop a worker", "kill horovodrun")
# TensorFlow traces its functions again after each fault, for seconds.
KILLS_OF_RANK_1 = {"torch": 7, "tensorflow": 3}

# Seconds, for a machine on which each recovery takes a minute
pytestmark = [LONG, pytest.mark.timeout(1800)]


class Watch:
    """Looks at a checkpoint root again and again, for how many commits it holds at most, however complete.

    Spare files of one commit count as one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Look no more; the most commits that were there at a time."""
        self._end.set()
        self._thread.join()
        return self.most

    def _look_on(self) -> None:
        while not self._end.wait(0.02):
            with suppress(FileNotFoundError):
                names = [path.name for path in self._root.iterdir()]
                of_commits = [name.removeprefix(TEMPORARY)[:15] for name in names]
                self.most = max(self.most, len({name for name in of_commits if CommitId.parse(name)}))


class Chaos:
    """A run that is disturbed.

    Args:
        run: the run.
        start: starts it.
        seed: of all that is random about it.
    """

    def __init__(self, run: FaultyRun, start: Start, seed: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self._start = start
        self.job = self.begin()

    def begin(self) -> Job:
        """Start it, or start it again."""
        return self.run.begin(self._start, "--hang-timeout", "30", *PATIENT, standby=True)

    def strike(self, kind: str) -> None:
        """Let a fault strike after some commits, and wait until all ranks train again."""
        commit = self.run.batches()[-1].commit + self.random.randrange(1, 12)
        self.run.wait_for(self.job, lambda batch: batch.commit >= commit)
        generation = max(self.run.generations())
        if kind in ("kill rank 0", "kill rank 1"):
            kill(self.run.process_of(int(kind[-1])))
        elif kind == "kill both":
            kill(self.run.process_of(0)), kill(self.run.process_of(1))
        elif kind == "stop a worker":
            os.kill(self.run.process_of(self.random.randrange(2)), signal.SIGSTOP)
        elif kind == "kill a guardian":
            kill(self.random.choice(running(self.job, *GUARDIAN)))
        elif kind == "kill horovodrun":
            kill(running(self.job, *DRIVER)[0])
        else:
            os.kill(self.job.pid, signal.SIGTERM)
            assert self.job.wait(PATIENCE) == PREEMPTED, self.job.tail()
            assert self.job.processes() == []
            self.job = self.begin()
        wait_until_all_train(self.run, self.job, generation)

    def sizes(self) -> list[tuple[int, int]]:
        """Sizes of the supervisor, the guardians and rank 0, as soon as there are standbys again."""
        ranks = {self.run.process_of(0), self.run.process_of(1)}  # some of which have been standbys
        wait_until(lambda: len(set(running(self.job, *STANDBY)) - ranks) == 2)
        living = [self.job.pid, *running(self.job, *GUARDIAN), self.run.process_of(0)]
        return [size(process) for process in living]

    def finish(self) -> None:
        """Have it leave."""
        os.kill(self.job.pid, signal.SIGTERM)
        assert self.job.wait(PATIENCE) == PREEMPTED, self.job.tail()
        assert self.job.processes() == []


def size(process: int) -> tuple[int, int]:
    """Open files of a process, but for the near tier's two or three slots, and its memory in kB."""
    status = Path(f"/proc/{process}/status").read_text().split()
    files = 0
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed meanwhile
            files += not str(descriptor.readlink()).startswith("/dev/shm/")
    return files, int(status[status.index("VmRSS:") + 1])


def assert_nothing_grows(sizes: list[list[tuple[int, int]]]) -> None:
    """Compare the sizes of processes that live through faults, before the first of them and after each."""
    half = len(sizes) // 2
    for place in range(4):
        files = [each[place][0] for each in sizes]
        memory = [each[place][1] for each in sizes]
        # Some files come and go; what leaks grows with each fault.
        assert max(files[half:]) <= max(files[:half]) + 2, files
        assert max(memory[half:]) <= max(memory[:half]) * 1.1, memory


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_random_faults(framework: str, start: Start, tmp_path: Path) -> None:
    run = FaultyRun(tmp_path / "run", framework, (), ENDLESS, "--step-seconds", "0.05")
    chaos = Chaos(run, start, seed=20)
    wait_until_all_train(run, chaos.job, 0)
    watch = Watch(run.root)
    # First what the supervisor, the guardians and rank 0 all live through, then what they don't.
    sizes = [chaos.sizes()]
    for _ in range(KILLS_OF_RANK_1[framework]):
        chaos.strike("kill rank 1")
        sizes.append(chaos.sizes())
    assert_nothing_grows(sizes)
    faults = list(FAULTS)
    chaos.random.shuffle(faults)
    for kind in faults:
        chaos.strike(kind)
    chaos.finish()
    assert Keep().last < watch.end() <= Keep().last + 2  # one more than is kept, and one being written
    ended = range(max(batch.epoch for batch in run.committed()))
    assert ended
    for epoch in ended:
        seen = run.samples(epoch)
        assert set(seen) == set(range(TRAINING_SAMPLES))
        assert seen.total() - TRAINING_SAMPLES <= 1
