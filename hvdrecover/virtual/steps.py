"""Steps of a job of virtual ranks: a loop over steps, and in it a loop over the parts of this process.

1. `steps` takes the batches of a step from a feed, such as `deal`.
2. For each virtual rank of this process, `Step` swaps its buffers in and seeds the random streams. The script
   computes. Then the step takes the gradients and the buffers.
3. The gradients of all processes are added up.
4. The script applies the gradients. At the commit or the next step, `VirtualRanks.settle` counts the samples
   as done.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdrecover.data.order import Indices, SampleOrder
from hvdrecover.errors import ConfigError, MismatchError, PerRankError, StepError
from hvdrecover.state.adapter import Framework, Tree
from hvdrecover.state.rank_local import Carried, PerRank
from hvdrecover.virtual.ranks import VirtualRanks

_END = object()
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Batches:
    fetch: Callable[[int], Any]  # returns the batch of a virtual rank of this process; called in their order
    done: Callable[[], None]  # counts the samples as done
    end: bool = False  # whether the data is known to end with it


Feed = Callable[[VirtualRanks], Iterator[Batches]]
"""Yields the batches of each step that is left; the same number of steps on all processes."""


class Step:
    """One step of all virtual ranks; iterate over it once, for the batches of this process."""

    def __init__(self, ranks: VirtualRanks, batches: Batches) -> None:
        self._ranks = ranks
        self._batches = batches
        self.begun = False

    def __iter__(self) -> Iterator[Any]:
        if self.begun:
            raise StepError("state.steps()", "a step can't be gone through twice; its samples are done")
        ranks, world, clock = self._ranks, self._ranks.context.world, self._ranks.context.clock
        self.begun, ranks.open = True, self
        ranks.buffers.absorb()
        for each in ranks.gradients:
            each.begin()
        for rank in ranks.carried.ranks:
            started = clock.monotonic()
            batch = self._batches.fetch(rank)
            ranks.buffers.swap_in(rank)
            ranks.seed(rank)
            ranks.current = rank
            try:
                yield batch
            finally:
                ranks.current = None  # also if the script leaves
            if ranks.open is not self:
                raise StepError(
                    "state.restore()", "called in a step's inner loop. Leave the loops over steps first"
                )
            for each in ranks.gradients:
                each.part_ends(rank)
            ranks.buffers.swap_out(rank)
            ranks.times.append(clock.monotonic() - started)
        for each in ranks.gradients:
            each.finish(ranks.counts, world.rank())
        ranks.seed(ranks.size)  # outside of parts, all processes share a stream
        ranks.steps += 1
        ranks.open, ranks.done = None, self._batches.done


Made = TypeVar("Made", bound=Step)


def steps(ranks: VirtualRanks, feed: Feed, kind: Callable[[VirtualRanks, Batches], Made]) -> Iterator[Made]:
    """Yield steps until the data ends. When shares change, the rest of the data is dealt out again."""
    ranks.settle()
    are_left = True
    while are_left:
        are_left, dealt = False, ranks.dealt
        for batches in feed(ranks):
            ranks.refuse_open("the next step was asked for")
            ranks.open = step = kind(ranks, batches)
            try:
                yield step
            finally:
                if ranks.open is step and not step.begun:  # the script has left the loop
                    ranks.open = None
            # Not if an error ends the script's loop: a bad step's samples are not done, but to be left out.
            ranks.settle()
            if not step.begun:
                raise StepError(
                    "state.steps()",
                    "a step was passed over; go through it by an inner loop: for batch in step: ...",
                )
            if dealt != ranks.dealt and not batches.end:
                are_left = True
                break


# -- sources of batches --------------------------------------------------------------------------------------


Part = tuple[int, int, Indices]
"""A step, a virtual rank, and the numbers of its samples in the step."""


def deal(
    order: SampleOrder,
    size: int,
    ranks: VirtualRanks,
    read: Callable[[Iterable[Part]], Iterator[Any]],
    *,
    drop_last: bool = False,
) -> Iterator[Batches]:
    """Yield the batches of each step from the cursor on, one sample to each virtual rank in turn."""
    order.begin()
    if order.on_iterate is not None:
        order.on_iterate()
    samples, first, epoch = order.rounds, ranks.steps, order.epoch
    starts = range(0, samples - (size - 1 if drop_last else 0), size)
    mine = {rank: order.share_of(rank) for rank in ranks.carried.ranks}
    parts = (
        (step, rank, share[start : start + size])
        for step, start in enumerate(starts, first)
        for rank, share in mine.items()
    )

    def done(count: int) -> None:
        if order.epoch == epoch:  # the script may have left the loop, and gone to the next one
            order.record(count)

    # `read` begins to read the parts of this process, in their order.
    batches = read(parts) if mine and starts else iter(())
    for start in starts:
        count = min(size, samples - start)
        yield Batches(lambda _: next(batches), functools.partial(done, count), start == starts[-1])
    if order.epoch == epoch:
        order.end()


@contextlib.contextmanager
def aside(framework: Framework) -> Iterator[None]:
    """Restore the random streams afterwards: numbers drawn in between depend on the process."""
    states = framework.generators()
    yield
    framework.set_generators(states)


def streams(loaders: PerRank, ranks: VirtualRanks, framework: Framework) -> Iterator[Batches]:
    """Yield the batches of loaders that know their place, one for each virtual rank, until they end."""

    def seeded(read: Callable[[int], Any]) -> dict[int, Any]:
        found = {}
        with aside(framework):
            for rank in carried:
                framework.seed(ranks.sample_seeds(ranks.steps, rank))
                found[rank] = read(rank)
        return found

    carried = ranks.carried.ranks
    iterators = seeded(lambda rank: iter(loaders.of(rank)))
    if loaders.on_iterate is not None:
        loaders.on_iterate()
    while True:
        found = seeded(lambda rank: next(iterators[rank], _END))
        ended = [rank for rank, batch in found.items() if batch is _END]
        if ranks.any_has_more(len(ended) < len(found)) and not ended:
            loaders.taken += 1
            yield Batches(found.__getitem__, lambda: None)
        elif 0 < len(ended) < len(found):
            raise StepError(
                "state.steps()",
                f"the loader of virtual rank {ended[0]} has ended, and others have not: they must have "
                "the same number of batches",
            )
        else:
            for rank in ended:
                loaders.ended(rank)
            return


class Buffers(ABC):
    """The buffers of all models, such as batch norm's statistics, of which each virtual rank has its own."""

    def __init__(self) -> None:
        self.taken = 0  # as `hvdrecover.state.rank_local.Value` has it
        # By virtual rank: only what parts have changed, so no masks and tables that no part writes to.
        self._own: dict[int, Tensors] = {}
        self._remember()

    @abstractmethod
    def names(self) -> Iterable[str]: ...

    @abstractmethod
    def read(self, name: str) -> Any:
        """Return a copy of a buffer."""

    @abstractmethod
    def write(self, name: str, tensor: Any) -> None: ...

    @abstractmethod
    def same(self, one: Any, other: Any) -> bool:
        """Return whether two copies have the same bits."""

    def absorb(self) -> None:
        """Give all virtual ranks the changes that the script made outside of parts."""
        for name in self.names():
            tensor = self.read(name)
            if self.same(tensor, _known(name, self._present)):
                continue
            if self._apart and any(name in own for own in self._own.values()):
                raise StepError(
                    name,
                    "this buffer was changed between a step's inner loop and the commit, for example by a "
                    "forward pass in training mode. There, each process has the buffer of another virtual "
                    "rank, so the result would depend on the number of processes. Do it after "
                    "state.commit(), which gives all processes the buffer of virtual rank 0, or call "
                    "model.eval() before",
                )
            self._common[name] = self._present[name] = tensor
            for own in self._own.values():
                own.pop(name, None)

    def swap_in(self, rank: int) -> None:
        """Give the models the buffers of a virtual rank."""
        self._put(self._own.get(rank, {}))

    def swap_out(self, rank: int) -> None:
        """Keep the buffers that a virtual rank has changed."""
        self._present = {name: self.read(name) for name in self.names()}
        own = self._own.setdefault(rank, {})
        for name, each in self._present.items():
            # A buffer that a part has changed is not compared again: that would cost time in each part.
            if name in own or not self.same(each, _known(name, self._common)):
                own[name] = each
        self._apart = True

    # As a value of each virtual rank; see `hvdrecover.state.rank_local.Value`.

    def states(self, carried: Carried) -> dict[int, Tree]:
        self.absorb()
        return {rank: dict(self._own.get(rank, {})) for rank in carried.ranks}

    def gathered(self, states: Mapping[int, Tree]) -> None:
        """Give the models virtual rank 0's buffers, so that a commit's model is the same on all processes."""
        # A buffer that any virtual rank has changed becomes part of all states.
        changed = {name for own in states.values() for name in own}
        for own in states.values():
            own.update({name: self._common[name] for name in changed - own.keys()})
        self._put(states.get(0, {}))
        self._apart = False

    def resume(self, name: str, states: Mapping[int, Tree], size: int, carried: Carried) -> None:
        for rank in carried.ranks:
            if rank not in states:
                raise PerRankError(
                    "buffers",
                    f"the commit has none of virtual rank {rank}; state.save() knows this process's only, so "
                    "make commits by state.commit()",
                )
            if unknown := sorted(states[rank].keys() - set(self.names())):
                raise MismatchError(
                    "buffers", [f"{each}: in the commit, but not in a model" for each in unknown]
                )
            self._own[rank] = dict(states[rank])

    def keep(self, carried: Carried) -> None:
        """Note which virtual ranks are carried out; the models have the common buffers now."""
        self._own = {rank: each for rank, each in self._own.items() if rank in carried.ranks}
        self._remember()

    def _remember(self) -> None:
        self._common: Tensors = {name: self.read(name) for name in self.names()}
        self._present = dict(self._common)  # the models' contents
        self._apart = False  # whether other processes have the buffers of other virtual ranks

    def _put(self, own: Mapping[str, Any]) -> None:
        """Give the models some buffers, and the common ones for all others."""
        self._present = {name: own.get(name, _known(name, self._common)) for name in self.names()}
        for name, each in self._present.items():
            self.write(name, each)


def _known(name: str, tensors: Mapping[str, Any]) -> Any:
    if name not in tensors:
        raise ConfigError("buffers", f"{name} was made after the state; make all buffers before the state")
    return tensors[name]
