"""One rank's session in a job: the parts of its state, and the one list of hooks.

A new feature that observes, keeps JSON in each commit, or votes is one file, and an entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Literal

from hvdrecover.checkpoint import Checkpoint
from hvdrecover.config import Config
from hvdrecover.guard.comparison import GuardHook
from hvdrecover.guard.numbers import Judge, Missing
from hvdrecover.guard.settings import Guard
from hvdrecover.scalars import Scalars, Tracker
from hvdrecover.state.durable import DurableSide
from hvdrecover.state.hooks import Context, Hook, Hooks
from hvdrecover.state.leaving import Leaving
from hvdrecover.state.liveness import Liveness, Timings
from hvdrecover.state.memory import Memory
from hvdrecover.state.random import Randomness
from hvdrecover.state.rank_local import RankLocalState
from hvdrecover.state.unresumed import Unresumed
from hvdrecover.version import __version__


class Session:
    """The parts of one rank's state, which `commit`, `rendezvous` and `run` work on.

    Attributes:
        call: calls a method of the state that the user's class may override, around our own work.
        root: the source rank of the last agreement.
        end_signals: ends the handling of stop signals that `State.resume` has begun; None if it was not
            called, or `State.finish` was.
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
            context.framework, context.world, context.place, context.contents.per_rank, rng
        )
        virtual = context.ranks.join(context, self.own, guard)
        dataset = guard.data.as_json() if guard is not None and guard.data is not None else None
        versions = {**context.framework.versions(), "hvdrecover": __version__}
        self.memory = Memory(context.contents, self.own, context.place, versions, dataset)
        self.durable = DurableSide(settings, context, self.memory)
        self.timings = Timings(context.clock, context.events)
        self.leaving = Leaving(context.config)
        self.hooks = Hooks(
            (
                Liveness(context.world),
                self.timings,
                *_instruments(context),
                # It watches gradients before the judge, which may skip a step.
                *([Scalars(tensorboard, context, tracker)] if tensorboard or tracker else []),
                self.durable,
                GuardHook(guard, context),
                *([Missing(context), Judge(guard, context)] if guard is not None else []),
                Unresumed(context),
                self.leaving,
                *virtual,
                *others,
            )
        )
        self.memory.kept = self.hooks.kept
        self.reset_callbacks: list[Callable[[], None]] = []
        self.root = 0
        self.guard = guard
        self.end_signals: Callable[[], None] | None = None


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
    if context.config.instruments is None:
        return ()
    found: tuple[Hook, ...] = import_module(context.config.instruments).observers(context)
    return found
