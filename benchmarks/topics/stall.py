"""The time for which a commit holds the training loop up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
from horovod.torch.elastic import TorchState as HorovodState

import hvdrecover.torch as recover
from benchmarks.measure import Reserve, Take, by_turns, let_clean_up, stopwatch
from benchmarks.peers import AsyncSave
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting, Training

_NEVER = 10**9  # commits
_TRIES = 20  # a write of few kilobytes is over before a second commit if the machine looks away


def measure(setting: Setting) -> list[Row]:
    """A commit in each situation, against Horovod's and torch's ways to keep a state."""
    hvd.init()
    training = Training(setting.shape, trained=True)
    reserve = Reserve(training.nbytes)
    what = "stall of a commit that is due, no write in flight"
    goals = Goal(0.6, 0.45), Goal(0.8, 0.5)
    return [*due(what, training, setting, reserve, *goals), *_others(training, setting, reserve)]


def due(
    what: str,
    training: Training,
    setting: Setting,
    reserve: Reserve,
    than_horovod: Goal | None = None,
    than_torch: Goal | None = None,
) -> list[Row]:
    """A commit that a durable write follows, beside what Horovod and torch do instead."""
    state = _joined(training, recover.Checkpoint(str(setting.folder / "due")))
    horovod = HorovodState(model=training.model, optimizer=training.optimizer, batch=0)
    dcp = AsyncSave(training, setting.folder, reserve)

    def commit() -> float:
        seconds = _changed(training, reserve, state.commit)
        state.flush()
        let_clean_up(state)
        return seconds

    name, async_save = dcp.best()
    save = functools.partial(_changed, training, reserve, horovod.save)
    ours, saves, stalls = by_turns(setting.rounds(15), [commit, save, async_save])
    dcp.close()
    return [
        _row(setting, what, ours, "Horovod's TorchState.save()", saves, than_horovod),
        _row(setting, what, ours, f"DCP async_save ({name})", stalls, than_torch),
    ]


def _others(training: Training, setting: Setting, reserve: Reserve) -> list[Row]:
    busy = _joined(training, recover.Checkpoint(str(setting.folder / "busy")))
    rare = _joined(training, recover.Checkpoint(str(setting.folder / "rare"), every_commits=_NEVER))
    horovod = HorovodState(model=training.model, optimizer=training.optimizer, batch=0)

    def in_flight() -> float:
        for _ in range(_TRIES):
            training.step()
            busy.commit()
            written = busy.last_commit
            training.nudge()
            beside_a_write = busy.last_durable != written
            seconds = stopwatch(busy.commit)
            busy.flush()
            let_clean_up(busy)
            if beside_a_write:
                return seconds
        raise RuntimeError(f"{_TRIES} writes were over before the second commit")

    takes: list[Take] = [
        in_flight,
        lambda: _changed(training, reserve, rare.commit),
        lambda: _changed(training, reserve, horovod.save),
    ]
    second, not_due, save = by_turns(setting.rounds(5), takes)
    peer = "Horovod's TorchState.save()"
    return [
        _row(setting, "stall of a commit, a write in flight", second, peer, save),
        _row(setting, "stall of a commit that is not due", not_due, peer, save),
    ]


def _joined(training: Training, checkpoint: recover.Checkpoint) -> recover.TorchState:
    Path(checkpoint.url).mkdir()
    state = recover.TorchState(
        model=training.model, optimizer=training.optimizer, batch=0, checkpoint=checkpoint
    )
    state.sync()
    return state


def _changed(training: Training, reserve: Reserve, action: Callable[[], object]) -> float:
    """Return how long an action takes after a step."""
    training.step()
    training.wait()
    with reserve.freed():
        return stopwatch(lambda: (action(), training.wait()))


def _row(
    setting: Setting, what: str, ours: list[float], peer: str, theirs: list[float], goal: Goal | None = None
) -> Row:
    ours, theirs = ([1e3 * seconds for seconds in values] for values in (ours, theirs))
    return Row("stall", what, setting.shape.title, "ms", ours, peer, theirs, goal)
