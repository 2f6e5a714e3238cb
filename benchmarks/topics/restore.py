"""How long it takes a process that starts to verify and load the newest commit."""

from __future__ import annotations

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
    """`TorchState.sync` of a process that starts, against ``torch.load`` and ``load_state_dict``."""
    hvd.init()
    root, file = setting.folder / "root", setting.folder / "saved.pt"
    _save(setting, root, file)
    reserve = Reserve(3 * setting.shape.nbytes)

    def ours(cold: bool) -> float:
        fresh = _fresh(setting, cold)
        state = _state(fresh, root)
        with reserve.freed():
            return 1e3 * stopwatch(state.sync)

    def theirs(cold: bool) -> float:
        fresh = _fresh(setting, cold)

        def load() -> None:
            saved = torch.load(file)
            fresh.model.load_state_dict(saved["model"])
            fresh.optimizer.load_state_dict(saved["optimizer"])

        with reserve.freed():
            return 1e3 * stopwatch(load)

    takes = [lambda: ours(True), lambda: theirs(True), lambda: ours(False), lambda: theirs(False)]
    ours_cold, cold, ours_warm, warm = by_turns(setting.rounds(5), takes)
    title = setting.shape.title
    return [
        Row("restore", "restore, nothing cached", title, "ms", ours_cold, _PEER, cold, Goal(0.8, 0.4)),
        Row("restore", "restore, files in the page cache", title, "ms", ours_warm, _PEER, warm),
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


def _fresh(setting: Setting, cold: bool) -> Training:
    training = Training(setting.shape, trained=False)
    if cold:
        forget_cached(setting.folder)
    else:
        for path in setting.folder.rglob("*"):
            if path.is_file():
                path.read_bytes()
    return training
