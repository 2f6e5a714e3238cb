"""The assembly of one rank's state: its trunk, and its companions in their order.

A new feature that looks on, is part of each commit, or votes is a file of its own and an entry here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.config import Config
from hvdrecover.elastic import instruments
from hvdrecover.elastic.agreement.timings import Timings
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.commits.own import Own
from hvdrecover.elastic.commits.randomness import Generators, Randomness
from hvdrecover.elastic.companions import Companions
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.durable.durability import DurableSide
from hvdrecover.elastic.durable.interval import Pacing
from hvdrecover.elastic.lifecycle.heartbeats import Liveness, Silences
from hvdrecover.elastic.lifecycle.hosts import HostChanges
from hvdrecover.elastic.lifecycle.leaving import Leaving
from hvdrecover.elastic.scalars.scalars import Scalars
from hvdrecover.elastic.scalars.trackers import Tracker
from hvdrecover.elastic.unresumed import Unresumed
from hvdrecover.guard.guard import GuardHook
from hvdrecover.guard.missing import Missing
from hvdrecover.guard.numbers import Judge
from hvdrecover.guard.settings import Guard
from hvdrecover.version import __version__


@dataclass(frozen=True)
class Rank:
    """The parts of one rank's state.

    Attributes:
        context: its surroundings.
        memory: the commits in memory.
        durable: the durable side.
        own: the states that ranks have of their own; the random streams.
        timings: of recoveries.
        hosts: changes of hosts, as Horovod's driver reports them.
        companions: what else takes part.
    """

    context: Context
    memory: Memory
    durable: DurableSide
    own: Own
    timings: Timings
    hosts: HostChanges
    companions: Companions


def assemble(
    context: Context,
    *,
    settings: Checkpoint | None,
    rng: Randomness,
    guard: Guard | None,
    tensorboard: str | None,
    tracker: Tracker | None,
    others: Companions,
) -> Rank:
    """Make all parts of one rank's state.

    Args:
        context: its surroundings.
        settings: what the user decides about durable commits; None without a checkpoint root.
        rng: how random generators are treated.
        guard: what is compared between the ranks; None for nothing.
        tensorboard: path or URL of the folder for TensorBoard's runs; None writes none.
        tracker: the experiment tracker to which rank 0 reports; None reports to none.
        others: the adapter's companions.

    Raises:
        ConfigError: a setting has no usable value.
    """
    own = Own(context.framework, context.contents.per_rank, Generators(context.framework, rng))
    virtual = context.ranks.join(context, own, guard)
    pacing = Pacing(context.clock, on=settings is not None and settings.interval == "auto")
    timings = Timings(context.clock, context.events, pacing)
    hosts = HostChanges(context.config)
    scalars = Scalars(tensorboard, context, tracker)
    unresumed = Unresumed(context)
    kept = (scalars, pacing, unresumed, *virtual, *others.kept)
    dataset = guard.data.as_json() if guard is not None and guard.data is not None else None
    versions = {**context.framework.versions(), "hvdrecover": __version__}
    memory = Memory(context.contents, own, kept, context.place, versions, dataset)
    durable = DurableSide(settings, context, pacing, memory)
    judge = Judge(guard, context)
    companions = Companions(
        observers=(
            Liveness(context.world),
            timings,
            *instruments.observers(context),
            scalars,
            judge,
            unresumed,
            *others.observers,
        ),
        kept=kept,
        voters=(
            scalars,  # hooks gradients before the judge, which may skip a step
            Silences(),
            durable,
            GuardHook(guard, context),
            Missing(context, on=guard is not None),
            judge,
            Leaving(context.config),
            hosts,
            *virtual,
            *others.voters,
        ),
    )
    return Rank(context, memory, durable, own, timings, hosts, companions)


def settings_of(checkpoint: Checkpoint | str | None, config: Config) -> Checkpoint | None:
    """Return the settings of durable commits; None without a checkpoint root.

    In a rehearsal, the environment's root takes the script's place, so that the job's is never touched.

    Args:
        checkpoint: as the script says.
        config: the process's settings.
    """
    root = checkpoint or config.checkpoint
    settings = root if isinstance(root, Checkpoint) or root is None else Checkpoint(root)
    if not config.rehearsal or settings is None or config.checkpoint is None:
        return settings
    return dataclasses.replace(settings, url=config.checkpoint)
