"""The time that it takes to verify and load the newest commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
from benchmarks import peers
from benchmarks.measure import Reserve, by_turns, forget_cached, stopwatch
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting, Training

_PEER = "torch.load + load_state_dict"


def measure(setting: Setting) -> list[Row]:
    """Loading into a new model and optimizer, against torch's own way, which verifies nothing."""
    hvd.init()
    root, file = setting.folder / "root", setting.folder / "saved.pt"
    _save(setting, root, file)
    reserve = Reserve(2 * setting.shape.nbytes)

    def take(prepare: Callable[[Training], Callable[[], object]], cold: bool) -> float:
        restore = prepare(Training(setting.shape, trained=False))
        _cache(setting.folder, not cold)
        with reserve.freed():
            return 1e3 * stopwatch(restore)

    def load(fresh: Training) -> Callable[[], object]:
        return lambda: recover.load(str(root), model=fresh.model, optimizer=fresh.optimizer)

    def start(fresh: Training) -> Callable[[], object]:
        return _state(fresh, root).sync

    def theirs(fresh: Training) -> Callable[[], object]:
        return lambda: _torch_load(fresh, file)

    ways = [(load, True), (theirs, True), (load, False), (theirs, False), (start, True)]
    takes = [lambda way=way, cold=cold: take(way, cold) for way, cold in ways]
    ours_cold, cold, ours_warm, warm, started = by_turns(setting.rounds(4), takes)
    title = setting.shape.title
    return [
        Row("restore", "restore, nothing cached", title, "ms", ours_cold, _PEER, cold, Goal(0.8, 0.4)),
        Row("restore", "restore, files in the page cache", title, "ms", ours_warm, _PEER, warm),
        Row("restore", "first sync of a job that resumes, nothing cached", title, "ms", started, _PEER, cold),
    ]


def _save(setting: Setting, root: Path, file: Path) -> None:
    training = Training(setting.shape, trained=True)
    state = _state(training, root)
    state.sync()
    state.commit()
    state.flush()
    peers.torch_save(training, file)


def _state(training: Training, root: Path) -> recover.TorchState:
    return recover.TorchState(
        model=training.model, optimizer=training.optimizer, batch=0, checkpoint=str(root)
    )


def _torch_load(training: Training, file: Path) -> None:
    saved = torch.load(file)
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])


def _cache(folder: Path, wanted: bool) -> None:
    """Have all files below a folder in the page cache, or none."""
    if not wanted:
        forget_cached(folder)
        return
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()
