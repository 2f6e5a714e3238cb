"""The ranks of a job that has no virtual ones: a process carries out itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.data.order import SampleOrder
    from hvdrecover.elastic.commits.own import Own, Value
    from hvdrecover.elastic.commits.per_rank import PerRank
    from hvdrecover.elastic.commits.randomness import Randomness
    from hvdrecover.elastic.context import Context
    from hvdrecover.guard.settings import Guard


class Ranks:
    """The ranks of a job, as one process sees them. With `VirtualRanks` in its place, it carries out several.

    Attributes:
        virtual: the number of virtual ranks; None if the job has none.
        replaying: whether what is computed now is another process's, and only compared.
    """

    virtual: int | None = None
    replaying = False

    def rng(self, asked: Randomness | None, default: Randomness) -> Randomness:
        """Return how random generators are treated, by what the script asks for, if anything.

        Raises:
            ConfigError: these ranks can't have it that way.
        """
        return asked or default

    def join(self, context: Context, own: Own, guard: Guard | None) -> tuple[Any, ...]:
        """Take a place in a state; called once. Return the companions that come with these ranks.

        Raises:
            ConfigError: the guard asks for what these ranks can't do.
        """
        if guard is not None and guard.replay:
            raise ConfigError("replay", "only parts of virtual ranks are replayed, and the state has none")
        return ()

    def values(self) -> Mapping[str, Value]:
        """Return what each rank has of its own besides the user's `PerRank`, by hidden name."""
        return {}

    def split(self, value: PerRank) -> None:
        """Let a value be that of the rank that is being carried out."""

    def deal(self, order: SampleOrder) -> None:
        """Let the samples of an order be dealt out to these ranks."""

    def carried_by(self, rank: int, size: int) -> Carried:
        """Return which ranks this process carries out, which is a rank of so many."""
        return Carried((rank,), size)

    def stream_of(self, rank: int) -> int:
        """Return the rank whose random streams this process has outside of a virtual rank's part."""
        return rank
