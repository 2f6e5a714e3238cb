"""The order of an epoch's samples and the cursor that says how many of them are done.

An epoch is one permutation, the same on all ranks. The cursor counts the samples that all ranks together
have done, so the samples ``order[cursor:]`` are left, whatever the number of ranks was or will be. They are
dealt out one by one, ``order[cursor + rank :: size]``; so that when every rank has done ``k`` of its own,
exactly the first ``k * size`` of them are done. A batch that is left out is a gap in the order: the samples
around it are dealt out as if it were not there. Padding comes from the start of the epoch's order, so that a
resumed epoch is padded as an undisturbed one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError, MismatchError

Tail = Literal["pad", "drop"]
Indices = npt.NDArray[np.int64]
Gap = tuple[int, int]
"""Positions that are left out: the first, and the one after the last."""

_iterations = itertools.count(1)


@functools.lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> Indices:
    """The shuffled order of an epoch: int64 of shape ``[length]``.

    Read-only. It is the same for ever: numpy promises not to change the stream of its legacy generator.
    """
    bits = np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch]))
    order = np.random.RandomState(bits).permutation(length).astype(np.int64)
    order.setflags(write=False)
    return order


def share(order: Indices, start: int, rank: int, size: int, tail: Tail, gaps: Sequence[Gap] = ()) -> Indices:
    """A rank's part of the samples from ``start`` on, equally long on all ranks.

    A last round that is not full is filled up from the start of the epoch's order. Where this pass over the
    epoch began must not matter: a resumed epoch ends like an undisturbed one, with the same samples repeated.

    Args:
        order: the epoch's samples, int64 of shape ``[length]``.
        start: the first that is left.
        rank: the rank.
        size: number of ranks.
        tail: fill a last round that is not full up (``pad``), or leave it out (``drop``).
        gaps: what is left out, in order.
    """
    left, all_of_it = count_left(len(order), start, gaps), count_left(len(order), 0, gaps)
    dealt = np.arange(rank, rounds(left, size, tail) * size, size)
    repeated = (dealt - left) % max(1, all_of_it)
    return order[np.where(dealt < left, past(start + dealt, start, gaps), past(repeated, 0, gaps))]


def count_left(length: int, start: int, gaps: Sequence[Gap]) -> int:
    """Return how many positions from ``start`` on are in no gap."""
    return length - start - sum(max(0, end - max(first, start)) for first, end in gaps)


def past(positions: Indices, start: int, gaps: Sequence[Gap]) -> Indices:
    """Positions counted from ``start`` on as if there were no gaps, moved to where they really are."""
    for first, end in gaps:
        if end > start:
            begin = max(first, start)
            positions = np.where(positions >= begin, positions + (end - begin), positions)
    return positions


def rounds(left: int, size: int, tail: Tail) -> int:
    """Return how many samples each of ``size`` ranks gets of ``left`` samples."""
    return left // size if tail == "drop" else math.ceil(left / size)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and int(value) >= 0


def _are_gaps(value: Any, length: int) -> bool:
    """Return whether a value is a list of pairs of positions, in order and apart."""
    if not isinstance(value, list) or not all(
        isinstance(gap, list) and len(gap) == 2 and all(map(_is_count, gap)) for gap in value
    ):
        return False
    flat = [position for gap in value for position in gap]
    return flat == sorted(flat) and all(first < end <= length for first, end in value)


class DealtTo(Protocol):
    """The ranks of this process, and of how many."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks."""

    @property
    def size(self) -> int:
        """The number of all ranks."""


class SampleOrder:
    """The sample order and cursor of one data set, as one rank sees it.

    Args:
        length: number of samples.
        shuffle: whether each epoch has an order of its own; otherwise samples come in their own order.
        seed: seed of the shuffling; the same on all ranks.
        tail: see `share`.

    Attributes:
        epoch: the epoch under way.
        done: the cursor: samples of this epoch that all ranks together have done, or left out.
        gaps: what is left out of this epoch, in order.
        begun: a number that is higher the later the last iteration was begun; 0 before the first.
        on_iterate: called when an iteration begins, after what the data loader itself draws from generators.
        on_record: called with this order and how many samples every rank has done, before they count.
        dealt_to: if samples are dealt out to virtual ranks, returns which of them this process carries out.

    Raises:
        ConfigError: a negative length, a seed that is not an integer, or an unknown ``tail``.
    """

    def __init__(self, length: int, *, shuffle: bool = True, seed: int = 0, tail: Tail = "pad") -> None:
        if length < 0:
            raise ConfigError("dataset", f"its length is {length}")
        if tail not in ("pad", "drop"):
            raise ConfigError("tail", f"'{tail}' is not a way to end an epoch; use 'pad' or 'drop'")
        if not isinstance(seed, int | np.integer):
            raise ConfigError("seed", f"{seed!r} is not an integer")
        self.length = length
        self.shuffle = bool(shuffle)
        self.seed = int(seed)  # a numpy integer would not go into JSON
        self.tail: Tail = tail
        self.epoch = 0
        self.done = 0
        self.gaps: list[Gap] = []
        self.begun = 0
        self.on_iterate: Callable[[], None] | None = None
        self.on_record: Callable[[SampleOrder, int], None] | None = None
        self.dealt_to: Callable[[], DealtTo] | None = None
        self._iterated = self._handed_out = False
        self._largest = 0  # number of samples that were recorded at once
        self._start = 0
        self._ranks: tuple[int, ...] = (0,)
        self.size = 1

    def place(self, rank: int, size: int) -> None:
        """Take a place among the ranks, unless virtual ranks have theirs; what is left is dealt out anew."""
        self._ranks, self.size = (rank,), size
        if self.dealt_to is not None:
            self._ranks, self.size = self.dealt_to().ranks, self.dealt_to().size
        self._begin()

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one continues.

        Raises:
            ConfigError: a negative epoch.
        """
        if not _is_count(epoch):
            raise ConfigError("epoch", f"{epoch!r} is not a number from 0 on")
        if epoch != self.epoch:
            self.epoch, self.done, self.gaps = int(epoch), 0, []
            self._begin()

    def record(self, count: int) -> None:
        """Note that every rank has done ``count`` more samples.

        Raises:
            ConfigError: a negative count.
        """
        if count < 0:
            raise ConfigError("batch_size", f"{count} samples can't have been done")
        if self.on_record is not None:
            self.on_record(self, int(count))
        self._largest = max(self._largest, int(count))
        self.done = self.position(self.done, int(count))
        heartbeat.recorded()

    def leave_out(self, start: int, count: int) -> None:
        """Have no rank see a batch again in this epoch, as if it were not there; what is left is dealt anew.

        Args:
            start: where the cursor was when the batch was begun; not before where it is now.
            count: how many samples of it each rank had.
        """
        end = self.position(start, count)
        if end > start:
            self.gaps = sorted([*self.gaps, (start, end)])
        self.done = int(past(np.array(self.done), self.done, self.gaps))
        self._begin()

    def present(self, count: int) -> list[int]:
        """The next ``count`` samples of each rank of this process, which are being done; one if unknown."""
        return [int(each) for rank in self._ranks for each in self.share_of(rank)[: count or 1]]

    @property
    def rank(self) -> int:
        """The rank that samples are dealt out to; of virtual ranks the first of this process."""
        return next(iter(self._ranks), 0)

    def position(self, start: int, count: int) -> int:
        """Return where the cursor comes to from ``start`` when every rank has done ``count`` more samples."""
        return min(self.length, int(past(np.array(start + count * self.size), start, self.gaps)))

    @property
    def left(self) -> int:
        """Return how many samples of this epoch all ranks together have not done."""
        return count_left(self.length, self.done, self.gaps)

    @property
    def rounds(self) -> int:
        """Return how many samples this rank was given when the iteration, or its place, was last begun."""
        return rounds(self._given, self.size, self.tail)

    @property
    def padding(self) -> int:
        """Return how many samples the ranks together repeat at the end of this pass over the epoch."""
        return max(0, self.rounds * self.size - self._given)

    @property
    def dropped(self) -> int:
        """Return how many samples at the end of this pass over the epoch no rank sees."""
        return max(0, self._given - self.rounds * self.size)

    def tail_report(self) -> dict[str, int]:
        """Return how the end of this pass over the epoch is evened out."""
        return {"epoch": self.epoch, "padding": self.padding, "dropped": self.dropped}

    def remaining(self) -> Indices:
        """The samples that no rank has done: int64, in order."""
        left = np.arange(self.done, self.done + self.left)
        return self._order()[past(left, self.done, self.gaps)]

    def begin(self) -> Indices:
        """Begin an iteration: this rank's samples from the cursor on.

        An epoch that has been gone through and is begun again without `set_epoch` starts from its first
        sample; but the first iteration after a restore resumes from the cursor, even if nothing is left. What
        a data loader leaves out as it would be less than a batch (``drop_last``) has been gone through.
        """
        least = self.size if self.tail == "drop" else 1
        if self._handed_out:
            least = max(least, self._largest * self.size)
        if self._iterated and self.left < least:
            self.done, self.gaps = 0, []
        self._iterated, self._handed_out = True, False
        self.begun = next(_iterations)
        self._start = self.done
        return self.share_of(self.rank)

    def end(self) -> None:
        """Note that an iteration has handed out all of this rank's samples."""
        self._handed_out = True

    def share_of(self, rank: int) -> Indices:
        """Return a rank's samples from the cursor on: int64."""
        return share(self._order(), self.done, rank, self.size, self.tail, self.gaps)

    def runs(self) -> list[tuple[int, int]]:
        """Return what all ranks are dealt in this pass, as runs of positions: from where, and how many."""
        count = self.rounds * self.size
        runs: list[tuple[int, int]] = []
        start = self._start
        while count > 0:
            for first, end in [*self.gaps, (self.length, self.length)]:
                number = min(count, max(0, first - start))
                runs += [(start, number)] if number else []
                count, start = count - number, max(start, end)
            start = 0
        return runs

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it counts in."""
        left_out = {"left_out": [list(gap) for gap in self.gaps]} if self.gaps else {}
        largest = {"largest": self._largest} if self._largest else {}
        return {"epoch": self.epoch, "processed_num": self.done, **self.counts_in(), **left_out, **largest}

    def load_state_dict(self, state: dict[str, Any], name: str = "sampler") -> None:
        """Go to a cursor.

        Args:
            state: what `state_dict` gave; all but ``epoch`` and ``processed_num`` may be missing.
            name: what the sampler is called in an error.

        Raises:
            MismatchError: the data set has another length, or the order another seed, than when it was saved.
                Nothing was changed.
        """
        if not isinstance(state, dict):
            raise MismatchError(
                name, [f"{name}: the commit holds a {type(state).__name__}, which is not a cursor"]
            )
        differences = [
            f"{name}: the commit's cursor counts in an order of {fact} {state[fact]}, not {mine}"
            for fact, mine in self.counts_in().items()
            if state.get(fact, mine) != mine
        ]
        gaps = state.get("left_out", [])
        counts = [state.get("epoch"), state.get("processed_num"), state.get("largest", 0)]
        if not all(map(_is_count, counts)) or not _are_gaps(gaps, self.length):
            differences.append(f"{name}: the commit holds {state}, which is not a cursor")
        if differences:
            raise MismatchError(name, differences)
        self.epoch = int(state["epoch"])
        self.done = min(self.length, int(state["processed_num"]))
        self.gaps = [(int(first), int(end)) for first, end in gaps]
        self._largest = int(state.get("largest", 0))
        self._begin()

    def counts_in(self) -> dict[str, Any]:
        """Return what the cursor counts in; in another order of samples it would mean nothing."""
        return {"length": self.length, "shuffle": self.shuffle, "seed": self.seed}

    @property
    def _given(self) -> int:
        """Return how many samples were left when the iteration, or its place, was last begun."""
        return count_left(self.length, self._start, self.gaps)

    def _begin(self) -> None:
        self._start = self.done
        self._iterated = self._handed_out = False

    def _order(self) -> Indices:
        if self.shuffle:
            return permutation(self.length, self.seed, self.epoch)
        return np.arange(self.length, dtype=np.int64)


def is_sampler(value: Any) -> bool:
    """Return whether a value has a place in a sample order, which a commit holds as a cursor."""
    return isinstance(getattr(value, "order", None), SampleOrder)
