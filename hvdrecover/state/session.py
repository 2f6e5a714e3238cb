"""One rank's session in a job: the parts of its state, and the one list of hooks.

A new feature that observes, keeps JSON in each commit, or votes is one file, and an entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Literal

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.config import Config
from hvdrecover.guard.guard import GuardHook
from hvdrecover.guard.numbers import Judge, Missing
from hvdrecover.guard.settings import Guard
from hvdrecover.scalars import Scalars
from hvdrecover.state.durable import DurableSide
from hvdrecover.state.hooks import Blank, Context, Hook, Hooks
from hvdrecover.state.interval import Pacing
from hvdrecover.state.leaving import Leaving
from hvdrecover.state.liveness import Liveness, Timings
from hvdrecover.state.memory import Memory
from hvdrecover.state.random import Generators, Randomness
from hvdrecover.state.rank_local import RankLocalState
from hvdrecover.state.unresumed import Unresumed
from hvdrecover.trackers import Tracker
from hvdrecover.version import __version__

Hear = Callable[[], BaseException | None]
"""Waits for the votes of all ranks, and returns the error that all are to raise."""


class Session:
    """The parts of one rank's state, which `commit`, `rendezvous` and `run` work on.

    Args:
        settings: of durable commits; None without a checkpoint root.
        others: the adapter's hooks.
        call: calls a method of the state that the user's class may override, around our own work.

    Attributes:
        own: the rank-local state.
        leaving: which ranks leave; and changes of hosts, as Horovod's driver reports them.
        reset_callbacks: functions to call when the ranks are others than before.
        root: the source rank of the last agreement.
        resumed: handles the stop signals from `State.resume` on; None if that was not called.
        finished_at: the last commit of a run that an earlier start had finished; else None.
        ended: whether the run is finished.
        may_roll_back: whether the guard may go back to the last commit.
    """

    def __init__(
        self,
        context: Context,
        *,
        settings: Checkpoint | None,
        rng: Randomness,
        guard: Guard | None,
        tensorboard: str | None,
        tracker: Tracker | None,
        others: Sequence[Hook],
        call: Callable[[Literal["save", "restore", "sync"], Callable[[], object]], None],
    ) -> None:
        self.context = context
        self.call = call
        self.own = RankLocalState(
            context.framework, context.contents.per_rank, Generators(context.framework, rng)
        )
        virtual = context.ranks.join(context, self.own, guard)
        dataset = guard.data.as_json() if guard is not None and guard.data is not None else None
        versions = {**context.framework.versions(), "hvdrecover": __version__}
        self.memory = Memory(context.contents, self.own, context.place, versions, dataset)
        pacing = Pacing(context.clock, on=settings is not None and settings.interval == "auto")
        self.durable = DurableSide(settings, context, pacing, self.memory)
        self.timings = Timings(context.clock, context.events, pacing.restored)
        self.leaving = Leaving(context.config)
        self.hooks = Hooks(
            (
                Liveness(context.world),
                self.timings,
                *_instruments(context),
                # It watches gradients before the judge, which may skip a step.
                *([Scalars(tensorboard, context, tracker)] if tensorboard or tracker else []),
                *([pacing] if pacing.on else []),
                self.durable,
                GuardHook(guard, context),
                *([Missing(context), Judge(guard, context)] if guard is not None else [Blank(2)]),
                Unresumed(context),
                self.leaving,
                *virtual,
                *others,
            )
        )
        self.memory.kept = self.hooks.kept
        self.reset_callbacks: list[Callable[[], None]] = []
        self.root = 0
        self.resumed: AbstractContextManager[None] | None = None
        self.finished_at: CommitId | None = None
        self.ended = False
        self.may_roll_back = guard is not None and guard.numerics == "rollback"


def settings_of(checkpoint: Checkpoint | str | None, config: Config) -> Checkpoint | None:
    """Return the settings of durable commits; None without a checkpoint root.

    In a rehearsal, the environment's root replaces the script's, so that the job's is never touched.
    """
    root = checkpoint or config.checkpoint
    settings = root if isinstance(root, Checkpoint) or root is None else Checkpoint(root)
    if not config.rehearsal or settings is None or config.checkpoint is None:
        return settings
    return dataclasses.replace(settings, url=config.checkpoint)


def _instruments(context: Context) -> tuple[Hook, ...]:
    """Return the hooks that the environment asks for, such as the witness of a drill."""
    if context.config.instruments is None:
        return ()
    found: tuple[Hook, ...] = import_module(context.config.instruments).observers(context)
    return found
