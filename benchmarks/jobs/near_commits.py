"""Commits with and without the near tier: ``hvdrecover run -np 2 -- python -m … SIZE STATE FOLDER``."""

from __future__ import annotations

import functools
import json
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
from benchmarks.measure import PeakMemory, by_turns, resident, stopwatch
from benchmarks.states import Setting, Shape, Training
from benchmarks.topics.slowdown import Work
from hvdrecover.checkpoint import near_tier
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.errors import HvdrecoverError

RESULT = "near-{rank}.json"
SMALL = {"full": Shape(8, 288), "small": Shape(2, 64)}  # 8 MB at full size
_NEVER = 1e9  # seconds between durable commits: only the first of a job is due
_PATIENCE = 30.0  # seconds for a commit to be sealed
_SEALING = 2.0  # seconds for a commit to be sealed once the tier has memory for it
_REST = 0.05  # seconds after one
_HEAD_START = 0.005  # seconds for all ranks to learn when they start
_STEP_SECONDS = {"full": 0.03, "small": 1e-3}
_BURST = 4  # commits without a pause, which need all the memory that commits ever need


class Tier:
    """A state whose commits go to the near tier, or not."""

    def __init__(self, training: Training, folder: Path, *, on: bool) -> None:
        folder.mkdir(exist_ok=True)
        self.near = near_tier.folder("auto", near_tier.named(str(folder))) if on else None
        self.state = recover.TorchState(
            model=training.model,
            optimizer=training.optimizer,
            batch=0,
            checkpoint=recover.Checkpoint(str(folder), every_seconds=_NEVER, near="auto" if on else None),
        )
        self.state.sync()
        deadline = time.monotonic() + _PATIENCE
        while not self._begun():
            if time.monotonic() > deadline:
                raise HvdrecoverError(f"no commit was sealed in {self.near}")
        self.state.flush()

    def _begun(self) -> bool:
        """Return whether a commit was sealed: the tier gets its memory in the background."""
        self.commit()
        deadline = time.monotonic() + _SEALING
        while not self.sealed() and time.monotonic() < deadline:
            time.sleep(_REST)
        mine = torch.tensor([float(self.sealed())])
        return bool(hvd.allreduce(mine, op=hvd.Min, name="begun").item())

    def commit(self) -> float:
        """Make a commit on all ranks together; milliseconds."""
        self.state.batch += 1
        _start_together()
        return 1e3 * stopwatch(self.state.commit)

    def sealed(self) -> bool:
        """Return whether the newest commit is in the near tier; True where that is off."""
        return self.near is None or (self.near / self.state.last_commit.name / FILE_NAME).exists()

    def settle(self) -> None:
        """Wait until the newest commit is sealed.

        Raises:
            HvdrecoverError: that takes too long.
        """
        deadline = time.monotonic() + _PATIENCE
        while not self.sealed():
            if time.monotonic() > deadline:
                raise HvdrecoverError(f"{self.state.last_commit.name} was not sealed in {self.near}")
            time.sleep(0.001)
        time.sleep(_REST)

    def nbytes(self) -> int:
        """Return the memory that the near root takes, in bytes."""
        files = [] if self.near is None else [path for path in self.near.rglob("*") if path.is_file()]
        return sum(path.stat().st_blocks * 512 for path in files)


def _start_together() -> None:
    """Return at the same moment on all ranks, which share a host; `hvd.barrier` lets one go 2 ms earlier."""
    now = torch.tensor([time.monotonic()], dtype=torch.float64)
    start = hvd.allreduce(now, op=hvd.Max, name="start").item() + _HEAD_START
    time.sleep(max(0.0, start - time.monotonic()))


def _memory(training: Training, folder: Path) -> tuple[Tier, dict[str, float]]:
    """Memory of commits as multiples of the state: of this process, and of the near root."""
    before, peak = resident(), PeakMemory()
    tier = Tier(training, folder, on=True)
    start = peak.nbytes() - before
    peak = PeakMemory()
    tier.state.commit(durable=True)
    for _ in range(_BURST):
        tier.commit()
    tier.state.flush()
    tier.settle()
    found = {"start": start, "burst": peak.nbytes() - before, "idle": resident() - before}
    shared = {"tmpfs": float(tier.nbytes())}
    return tier, {name: nbytes / training.nbytes for name, nbytes in {**found, **shared}.items()}


def _stalls(training: Training, tiers: list[Tier], rounds: int, *, again: bool) -> list[list[float]]:
    """Milliseconds of a commit of each; alone, or right after another one."""

    def take(tier: Tier) -> float:
        training.step()
        if again:
            tier.commit()
        milliseconds = tier.commit()
        tier.settle()
        return milliseconds

    return by_turns(rounds, [functools.partial(take, tier) for tier in tiers])


def _small(setting: Setting) -> list[list[float]]:
    training = Training(SMALL[setting.size], trained=True)
    folders = {name: setting.folder / f"small-{name}" for name in ("on", "off")}
    tiers = [Tier(training, folder, on=name == "on") for name, folder in folders.items()]

    def take(tier: Tier) -> float:
        milliseconds = tier.commit()
        tier.settle()
        return milliseconds

    return by_turns(setting.rounds(60), [functools.partial(take, tier) for tier in tiers], warmups=5)


def _steps(tier: Tier, setting: Setting) -> list[list[float]]:
    """Milliseconds of steps while a commit is being sealed, and of as many after it."""
    work = Work(_STEP_SECONDS[setting.size])
    during: list[float] = []
    without: list[float] = []
    for _ in range(setting.rounds(30)):
        tier.commit()
        block: list[float] = []
        while not tier.sealed() or not block:
            block.append(1e3 * stopwatch(work))
        time.sleep(_REST)
        after = [1e3 * stopwatch(work) for _ in block]
        for _ in range(2 + len(block) // 2):  # the other rank may still be at it
            work()
        during += block
        without += after
    return [during, without]


def main(setting: Setting) -> None:
    """Measure everything, and write down what this rank has found."""
    hvd.init()
    torch.set_num_threads(1)
    training = Training(setting.shape, trained=True)
    tier, memory = _memory(training, setting.folder / "on")
    found: dict[str, object] = {"memory": memory, "steps": _steps(tier, setting)}
    off = Tier(training, setting.folder / "off", on=False)
    for name, again in (("alone", False), ("again", True)):
        found[name] = _stalls(training, [tier, off], setting.rounds(10), again=again)
    found["small"] = _small(setting)
    unfinished = setting.folder / f"unfinished-{hvd.rank()}"
    unfinished.write_text(json.dumps(found))
    unfinished.replace(setting.folder / RESULT.format(rank=hvd.rank()))
    signal.pause()  # an end without a finished run would be repaired


if __name__ == "__main__":
    main(Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
