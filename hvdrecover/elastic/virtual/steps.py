"""Steps of a job of virtual ranks: a loop over steps, and in it one over the parts of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hvdrecover.clock import Clock
from hvdrecover.elastic.attributes import nothing
from hvdrecover.elastic.virtual.ranks import VirtualRanks
from hvdrecover.errors import StepError


@dataclass(frozen=True)
class Batches:
    """The batches of one step.

    Attributes:
        fetch: returns that of a virtual rank; called for those that the process carries out, in order.
        done: notes that the step is done.
    """

    fetch: Callable[[int], Any]
    done: Callable[[], None]


class Feed(Protocol):
    """The source of batches."""

    def begin(self, ranks: VirtualRanks) -> Iterator[Batches]:
        """Yield the batches of each step that is left; the same number of steps on all processes."""


class Step:
    """One step of all virtual ranks. Iterate over it, once: over the batches of those of this process.

    When its loop has ended, the gradients are those of the whole job. With ``Guard(replay=…)`` the loop of
    some steps has one batch more, whose gradients are only compared.

    Args:
        ranks: the virtual ranks.
        batches: of the step.
        clock: where times come from.

    Attributes:
        begun: whether it has been iterated over.
    """

    def __init__(self, ranks: VirtualRanks, batches: Batches, clock: Clock) -> None:
        self._ranks = ranks
        self._batches = batches
        self._clock = clock
        self.begun = False

    def __iter__(self) -> Iterator[Any]:
        if self.begun:
            raise StepError("state.steps()", "a step can't be gone through twice; its samples are done")
        self.begun = True
        ranks = self._ranks
        ranks.step_begins(self)
        fetch = self._batches.fetch
        replayed = ranks.replay.begin(fetch) if ranks.replay is not None else None
        if replayed is not None:
            fetch = replayed.fetch
            yield from replayed.before()
        for rank in ranks.carried.ranks:
            started = self._clock.monotonic()
            batch = fetch(rank)
            ranks.part_begins(rank)
            try:
                yield batch
            finally:
                ranks.current = None  # also if the script leaves
            ranks.part_ends(rank, self._clock.monotonic() - started)
        if replayed is not None:
            yield from replayed.after()
            if replayed.error is not None:
                ranks.step_ends(nothing)
                raise replayed.error
        ranks.step_ends(self._batches.done)

    @property
    def replaying(self) -> bool:
        """Return whether the present batch is another process's, to be compared only."""
        return self._ranks.replaying

    def require_begun(self) -> None:
        """Refuse the next step if the script has passed this one over.

        Raises:
            StepError: so it is.
        """
        if not self.begun:
            raise StepError(
                "state.steps()",
                "a step was passed over; go through it by an inner loop: for batch in step: ...",
            )


Made = TypeVar("Made", bound=Step)


def steps(
    ranks: VirtualRanks, feed: Feed, clock: Clock, kind: Callable[[VirtualRanks, Batches, Clock], Made]
) -> Iterator[Made]:
    """Yield steps until the data ends; when shares change, data is dealt out anew from there.

    Args:
        ranks: the virtual ranks.
        feed: where batches come from.
        clock: where times come from.
        kind: makes a step: `Step`, or an adapter's.
    """
    ranks.settle()
    dealt = -1
    while dealt != ranks.dealt:
        dealt = ranks.dealt
        for batches in feed.begin(ranks):
            step = kind(ranks, batches, clock)
            ranks.offer(step)
            try:
                yield step
            finally:  # the script may break
                if not step.begun:
                    ranks.withdraw(step)
            # Not if an error ends the script's loop: a bad step's samples are not done, but to be left out.
            ranks.settle()
            step.require_begun()
            if dealt != ranks.dealt:
                break
