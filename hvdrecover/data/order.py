"""The order of an epoch's samples and the cursor that says how many of them are done.

1. An epoch is one permutation, the same on all ranks.
2. The cursor counts the samples that all ranks together have done. The samples ``order[cursor:]`` are left,
   for any number of ranks.
3. A rank gets ``order[cursor + rank :: size]``. When every rank has done ``k`` samples, exactly the first
   ``k * size`` are done, so the cursor needs no list of samples.
4. A batch that is left out is a gap in the order. The other samples are dealt out as if there was no gap.
5. Padding comes from the start of the epoch's order, so a resumed epoch gets the same padding as an
   undisturbed one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError, MismatchError
from hvdrecover.events import logger

Tail = Literal["pad", "drop"]
Indices = npt.NDArray[np.int64]
Gap = tuple[int, int]
"""Positions to leave out: the first, and the one after the last."""
Stretch = tuple[int, int, int, int]
"""A `Gap` of one pass: its epoch, the number of earlier passes over that epoch, and two positions."""

_iterations = itertools.count(1)


@functools.lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> Indices:
    """The shuffled order of an epoch. It never changes: numpy freezes the stream of its legacy generator."""
    bits = np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch]))
    order = np.random.RandomState(bits).permutation(length).astype(np.int64)
    order.setflags(write=False)
    return order


def rounds(left: int, size: int, tail: Tail) -> int:
    """Return how many samples each of ``size`` ranks gets of ``left`` samples."""
    return left // size if tail == "drop" else math.ceil(left / size)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 0


_PLACE = ("epoch", "passes", "done", "_left_out", "_start", "_iterated", "_handed_out")
_AGAIN = "epoch {} is repeated, in the same order: set_epoch() was not called with another epoch"
_EMPTY = "this pass over epoch {} is empty: the commit was made at its end, without set_epoch() since"
_BACK = (
    "set_epoch({}) goes back from epoch {}: {} of {} samples were done, and they come again. Perhaps a "
    "training framework called set_epoch() with its own count"
)


class SampleOrder:
    """The sample order and cursor of one data set, as one rank sees it."""

    def __init__(self, length: int, *, shuffle: bool = True, seed: int = 0, tail: Tail = "pad") -> None:
        if tail not in ("pad", "drop"):
            raise ConfigError("tail", f"'{tail}' is not a way to end an epoch; use 'pad' or 'drop'")
        if not isinstance(seed, int | np.integer):
            raise ConfigError("seed", f"{seed!r} is not an integer")
        self.length = length
        self.shuffle = bool(shuffle)
        self.seed = int(seed)  # a numpy integer would not go into JSON
        self.tail: Tail = tail
        self.size = 1  # number of ranks
        self.epoch = 0
        self.passes = 0  # earlier passes over this epoch, without `set_epoch` to another one
        self.done = 0  # the cursor: samples of this pass that all ranks together have done, or left out
        self.batch_size = 0  # samples in one rank's batch, if the loader has set it; else 0
        self.stepped = False  # an optimizer has stepped: the next batch recorded is the last of that step
        self.unstepped = 0  # position of the first batch that is not part of a step yet
        self.begun = 0  # serial number of the last iteration among all orders of this process; 0 before
        # Called when an iteration begins, after the data loader itself has drawn from generators.
        self.on_iterate: Callable[[], None] | None = None
        # Called with this order and how many samples every rank has done, before they count.
        self.on_record: Callable[[SampleOrder, int], None] | None = None
        # Returns the virtual ranks of this process and the number of all, if samples are dealt out to them.
        self.dealt_to: Callable[[], tuple[tuple[int, ...], int]] | None = None
        self._ranks: tuple[int, ...] = (0,)
        self._start = 0  # the cursor when the iteration, or its place, was last begun
        self._iterated = self._handed_out = False
        self._largest = 0  # number of samples that were recorded at once
        self._left_out: list[Stretch] = []  # samples left out of this pass and later ones
        self._named: list[int] = []  # epochs that `set_epoch` was given since the last iteration began
        self._before: dict[str, Any] = {}  # the place before it was given the first of them
        self._warned: set[str] = set()

    # -- the place ---------------------------------------------------------------------------------------

    def place(self, rank: int, size: int) -> None:
        """Take a place among the ranks (virtual ranks have their own), and deal the rest out again."""
        self._ranks, self.size = ((rank,), size) if self.dealt_to is None else self.dealt_to()
        self._named = []
        self._begin()

    @property
    def rank(self) -> int:
        """The rank that samples are dealt out to; of virtual ranks the first of this process."""
        return next(iter(self._ranks), 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one continues."""
        if not _is_count(epoch):
            raise ConfigError("epoch", f"must be an integer ≥ 0, got {epoch!r}")
        if not self._named:
            self._before = {name: vars(self)[name] for name in _PLACE}
        self._named.append(int(epoch))
        vars(self).update(self._before)
        # A framework may name its own epochs after the script has, from 0 on whenever its loop begins; and a
        # script may name each epoch that it skips. So the highest counts.
        if (highest := max(self._named)) != self.epoch:
            self._enter(highest, 0)
            self._begin()

    def begin(self) -> Indices:
        """Begin an iteration: return this rank's samples from the cursor on."""
        # Samples that a data loader leaves out, as they fill no batch (``drop_last``), are done as well.
        least = self.size if self.tail == "drop" else 1
        if self._handed_out:
            least = max(least, self._largest * self.size)
        before = self._before if self._named else {"epoch": 0, "done": 0}
        if self.epoch < before["epoch"] and 0 < before["done"] < self.length:
            self._warn(_BACK, self.epoch, before["epoch"], before["done"], self.length)
        # A finished epoch starts again without `set_epoch`; the first iteration after a restore does not.
        if self._iterated and self.left < least:
            if self.done:
                self._warn(_AGAIN, self.epoch)
            self._enter(self.epoch, self.passes + 1)
        elif self.done and self.left < least and (self.passes or not self._named):
            self._warn(_EMPTY, self.epoch)
        self._begin()
        self._iterated, self._named = True, []
        self.begun = next(_iterations)
        return self.share_of(self.rank)

    def end(self) -> None:
        """Note that an iteration has handed out all of this rank's samples."""
        self._iterated = self._handed_out = True

    def _enter(self, epoch: int, passes: int) -> None:
        """Go to the beginning of a pass."""
        ahead = (epoch, passes) > (self.epoch, self.passes)
        self._left_out = [each for each in self._left_out if ahead and each[:2] >= (epoch, passes)]
        self.epoch, self.passes = epoch, passes
        self.done = int(self._past(np.array(0), 0))

    def _begin(self) -> None:
        self._start = self.unstepped = self.done
        self._iterated = self._handed_out = self.stepped = False

    def _warn(self, message: str, *facts: int) -> None:
        """Warn once, on rank 0; `set_epoch` may go back on one rank only."""
        if message not in self._warned and (0 in self._ranks or message is _BACK):
            remedy = "Call sampler.set_epoch(state.epoch) at the top of each epoch."
            logger.warning("%s. %s", message.format(*facts), remedy)
        self._warned.add(message)

    # -- samples done ------------------------------------------------------------------------------------

    def record(self, count: int) -> None:
        """Note that every rank has done ``count`` more samples."""
        if count < 0:
            raise ConfigError("batch_size", f"{count} samples can't have been done")
        if self.on_record is not None:
            self.on_record(self, int(count))
        self._largest = max(self._largest, int(count))
        self.done = self.position(self.done, int(count))
        self._named = []
        if self.stepped:
            self.stepped, self.unstepped = False, self.done
        heartbeat.recorded()

    @property
    def recorded(self) -> bool:
        """Whether samples were ever recorded, in this process or before the commit it resumed from."""
        return self._largest > 0

    def position(self, start: int, count: int) -> int:
        """Return the cursor after every rank has done ``count`` samples from ``start`` on."""
        return min(self.length, int(self._past(np.array(start + count * self.size), start)))

    def stretch(self, start: int, count: int) -> Stretch:
        """Return the samples from a position to the end of a batch of which each rank has ``count``."""
        return self.epoch, self.passes, start, self.position(self.done, count)

    def leave_out(self, stretch: Stretch) -> None:
        """Leave samples out of their pass, as if the data set did not have them; deal the rest out again."""
        joined: list[Stretch] = []
        for each in sorted([*self._left_out, stretch]):
            # Join stretches that overlap or touch: no sample may count twice.
            if joined and each[:2] == joined[-1][:2] and each[2] <= joined[-1][3]:
                joined[-1] = (*joined[-1][:3], max(joined[-1][3], each[3]))
            elif each[2] < each[3]:
                joined.append(each)
        self._left_out = joined
        # The pass may be a later one: the cursor may have gone back beyond its beginning.
        self.done = int(self._past(np.array(self.done), self.done))
        self._begin()

    @property
    def gaps(self) -> list[Gap]:
        return [each[2:] for each in self._left_out if each[:2] == (self.epoch, self.passes)]

    # -- samples left ------------------------------------------------------------------------------------

    def _count(self, start: int) -> int:
        """Return how many positions from ``start`` on are in no gap."""
        return self.length - start - sum(max(0, end - max(first, start)) for first, end in self.gaps)

    def _past(self, positions: Indices, start: int) -> Indices:
        """Move positions behind gaps. They were counted from ``start`` on as if there were no gaps."""
        for first, end in self.gaps:
            if end > start:
                begin = max(first, start)
                positions = np.where(positions >= begin, positions + (end - begin), positions)
        return positions

    @property
    def left(self) -> int:
        """How many samples of this epoch all ranks together have not done."""
        return self._count(self.done)

    def remaining(self) -> Indices:
        """The samples that no rank has done: int64, in order."""
        return self._order()[self._past(np.arange(self.done, self.done + self.left), self.done)]

    def share_of(self, rank: int, start: int | None = None) -> Indices:
        """Return a rank's samples from a position on, or the cursor: int64, equally many for all ranks."""
        start = self.done if start is None else start
        left, whole = self._count(start), self._count(0)
        dealt = np.arange(rank, rounds(left, self.size, self.tail) * self.size, self.size)
        repeated = (dealt - left) % max(1, whole)
        past = np.where(dealt < left, self._past(start + dealt, start), self._past(repeated, 0))
        return self._order()[past]

    def present(self, *, whole_step: bool = False) -> list[int]:
        """The samples of this process that are being done; one of each rank if the batch size is unknown.

        With ``whole_step``, also those of earlier batches whose gradients the optimizer adds up in this step.
        """
        start = self.unstepped if whole_step else self.done
        count = (self._count(start) - self.left) // self.size + (self.batch_size or self._largest or 1)
        return [int(each) for rank in self._ranks for each in self.share_of(rank, start)[:count]]

    def _order(self) -> Indices:
        if self.shuffle:
            return permutation(self.length, self.seed, self.epoch)
        return np.arange(self.length, dtype=np.int64)

    @property
    def rounds(self) -> int:
        """How many samples this rank was given when the iteration, or its place, was last begun."""
        return rounds(self._count(self._start), self.size, self.tail)

    @property
    def padding(self) -> int:
        """How many samples the ranks together repeat at the end of this pass; if negative, leave out."""
        return self.rounds * self.size - self._count(self._start)

    # -- in commits --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and the facts of the order in which it counts."""
        later = [list(each) for each in self._left_out if each[:2] != (self.epoch, self.passes)]
        optional = {
            "passes": self.passes,
            "left_out": [list(gap) for gap in self.gaps],
            "left_out_later": later,
            "largest": self._largest,
        }
        known = {name: value for name, value in optional.items() if value}
        return {"epoch": self.epoch, "processed_num": self.done, **self.counts_in(), **known}

    def load_state_dict(self, state: dict[str, Any], name: str = "sampler") -> None:
        """Go to a cursor that `state_dict` gave; all but ``epoch`` and ``processed_num`` may be missing."""
        if differences := self.misfits(state, name):
            raise MismatchError(name, differences)
        self.epoch, self.passes = int(state["epoch"]), int(state.get("passes", 0))
        self.done = min(self.length, int(state["processed_num"]))
        gaps = [(self.epoch, self.passes, *gap) for gap in state.get("left_out", [])]
        self._left_out = [*gaps, *map(tuple, state.get("left_out_later", []))]
        self._largest = int(state.get("largest", 0))
        self._named = []
        self._begin()

    def misfits(self, state: Any, name: str) -> list[str]:
        """Return why `load_state_dict` would refuse a cursor, in a line each; empty if it would not."""
        if not isinstance(state, dict):
            return [f"{name}: the commit holds a {type(state).__name__}, which is not a cursor"]
        differences = [
            f"{name}: the commit's cursor counts in an order of {fact} {state[fact]}, not {mine}"
            for fact, mine in self.counts_in().items()
            if state.get(fact, mine) != mine
        ]
        if not all(_is_count(state.get(each)) for each in ("epoch", "processed_num")):
            differences.append(f"{name}: the commit holds {state}, which is not a cursor")
        return differences

    def counts_in(self) -> dict[str, Any]:
        """Return the facts of the order in which the cursor counts; in another order it has no meaning."""
        return {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}
