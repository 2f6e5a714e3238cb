"""Figures of one state in a process of its own: ``python -m … WHAT LAYERS WIDTH ROUNDS FOLDER``."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
from benchmarks.measure import PeakMemory, forget_cached, resident, stopwatch
from benchmarks.states import Shape, Training
from hvdrecover.checkpoint import near_tier
from hvdrecover.checkpoint.manifest import FILE_NAME

Figures = dict[str, list[float]]

ROOT, NEAR, LIMIT = "root", "near", "limit"  # names of files and folders
_LOOK, _PATIENCE = 0.001, 20.0  # seconds between looks for a sealed commit, and to wait for it
_SETTLE = 0.5  # seconds after each of the first commits
_BURST = 3  # commits in a row, of which the first is being written


def commits(shape: Shape, rounds: int, folder: Path) -> Figures:
    """A commit, its way to the disk, and the memory of both as multiples of the state."""
    _committed(_state(Training(Shape(1, 8), trained=True), folder / "first"))  # loads code
    training = Training(shape, trained=True)
    before = resident()
    state = _state(training, folder / ROOT)
    _committed(state)  # memory and files are there from now on
    found: Figures = {"commit": [], "durable": [], "idle": [], "beside": []}
    for _ in range(rounds):
        state.batch += 1
        found["commit"].append(stopwatch(state.commit))
        found["durable"].append(found["commit"][-1] + stopwatch(state.flush))
        found["idle"].append((resident() - before) / shape.nbytes)
    peak = PeakMemory()
    for _ in range(_BURST):
        state.batch += 1
        state.commit()
    state.flush()
    found["beside"].append((peak.nbytes() - before) / shape.nbytes)
    return found


def limited(shape: Shape, rounds: int, folder: Path) -> Figures:
    """Commits where memory may be scarce, each right after the one before, so that a write is in flight."""
    training = Training(shape, trained=True)
    _limit(*json.loads((folder / LIMIT).read_text()))
    state = _state(training, folder / ROOT)
    found: Figures = {"commit": []}
    for _ in range(_BURST + rounds):
        state.batch += 1
        found["commit"].append(stopwatch(state.commit))
    state.flush()
    return found


def restores(shape: Shape, rounds: int, folder: Path) -> Figures:
    """Loading what `commits` has written, with nothing cached, and the memory that it takes at its peak."""
    found: Figures = {"restore": [], "loading": []}
    for _ in range(rounds):
        training = Training(shape, trained=False)
        forget_cached(folder / ROOT)
        before, peak = resident(), PeakMemory()

        def load(training: Training = training) -> None:
            recover.load(str(folder / ROOT), model=training.model, optimizer=training.optimizer)

        found["restore"].append(stopwatch(load))
        found["loading"].append((peak.nbytes() - before) / shape.nbytes)
        del training, load
    return found


def near(shape: Shape, rounds: int, folder: Path) -> Figures:
    """Commits in the near tier, and how long until they are sealed; nothing if it finds no room."""
    training = Training(shape, trained=True)
    tier = json.loads((folder / NEAR).read_text())
    before, peak = resident(), PeakMemory()
    root = str(folder / "durable")
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        batch=0,
        checkpoint=recover.Checkpoint(root, every_seconds=1e9, near=tier),
    )
    state.sync()
    found: Figures = {"near": [], "sealed": []}
    for number in range(_BURST + rounds):
        state.batch += 1
        began = time.monotonic()
        state.commit()
        seconds = time.monotonic() - began
        sealed = near_tier.folder(tier, near_tier.named(root)) / state.last_commit.name / FILE_NAME
        if number < _BURST:  # the tier gets its memory in the background
            state.flush()
            time.sleep(_SETTLE)
            continue
        while not sealed.exists():
            if time.monotonic() > began + _PATIENCE:
                return {}
            time.sleep(_LOOK)
        found["near"].append(seconds)
        found["sealed"].append(time.monotonic() - began)
    files = [each for each in Path(tier).rglob("*") if each.is_file()]
    found["tmpfs"] = [sum(each.stat().st_blocks * 512 for each in files) / shape.nbytes]
    found["keeper"] = [(peak.nbytes() - before) / shape.nbytes]
    return found


def syncs(shape: Shape, rounds: int, folder: Path) -> Figures:
    """Rank 1 is new each time, and rank 0 has trained; the slower of both, by two real workers."""
    new = hvd.rank() != 0
    training = Training(shape, trained=not new)
    old = None if new else _state(training)
    if new:
        _state(training)
    found: Figures = {"sync": []}
    for number in range(rounds):
        if new:
            del training
            gc.collect()  # the state before has cycles
            training = Training(shape, trained=False)
            state = recover.TorchState(model=training.model, optimizer=training.optimizer, batch=0)
        else:
            assert old is not None
            state = old
        hvd.barrier()
        mine = torch.tensor([stopwatch(state.sync)], dtype=torch.float64)
        found["sync"].append(float(hvd.allgather(mine, name=f"took.{number}").max()))
        del state
    return found


def _state(training: Training, root: Path | None = None) -> recover.TorchState:
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        batch=0,
        checkpoint=None if root is None else recover.Checkpoint(str(root), keep=1),
    )
    state.sync()
    return state


def _limit(cgroup: str, more: int) -> None:
    """Let this process's cgroup have so many bytes more than it uses now."""
    words = Path(cgroup, "memory.stat").read_text().split()
    cached = int(words[words.index("total_inactive_file") + 1])
    used = int(Path(cgroup, "memory.usage_in_bytes").read_text())
    Path(cgroup, "memory.limit_in_bytes").write_text(str(used - cached + more))


def _committed(state: recover.TorchState) -> None:
    """Commit beside a write once."""
    for _ in range(_BURST):
        state.batch += 1
        state.commit()
    state.flush()


WAYS: dict[str, Callable[[Shape, int, Path], Figures]] = {
    each.__name__: each for each in (commits, limited, restores, near, syncs)
}

if __name__ == "__main__":
    what, layers, width, rounds, folder = sys.argv[1:]
    hvd.init()
    found = WAYS[what](Shape(int(layers), int(width)), int(rounds), Path(folder))
    if hvd.rank() == 0:
        Path(folder, f"{what}.json").write_text(json.dumps(found))
