"""The order of an epoch's samples and the cursor that says how many of them are done.

An epoch is one permutation, the same on all ranks. The cursor counts the samples that all ranks together
have done, so the samples ``order[cursor:]`` are left, whatever the number of ranks was or will be. They are
dealt out one by one, ``order[cursor + rank :: size]``; so that when every rank has done ``k`` of its own,
exactly the first ``k * size`` of them are done.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hvdrecover.errors import ConfigError, MismatchError

Tail = Literal["pad", "drop"]
Indices = npt.NDArray[np.int64]


@functools.lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> Indices:
    """The shuffled order of an epoch: int64 of shape ``[length]``.

    Read-only. It is the same for ever: numpy promises not to change the stream of its legacy generator.
    """
    bits = np.random.MT19937(np.random.SeedSequence([seed % 2**64, epoch]))
    order = np.random.RandomState(bits).permutation(length).astype(np.int64)
    order.setflags(write=False)
    return order


def share(left: Indices, rank: int, size: int, tail: Tail) -> Indices:
    """A rank's part of the samples that are left, equally long on all ranks.

    Args:
        left: the samples that are left, in order.
        rank: the rank.
        size: number of ranks.
        tail: how to deal with a last round that is not full: repeat samples from the start of ``left``
            (``pad``) or leave it out (``drop``).
    """
    rounds = len(left) // size if tail == "drop" else math.ceil(len(left) / size)
    if rounds == 0:
        return left[:0]
    return left[np.arange(rank, rounds * size, size) % len(left)]


class SampleOrder:
    """The sample order and cursor of one data set, as one rank sees it.

    Args:
        length: number of samples.
        shuffle: whether each epoch has an order of its own; otherwise samples come in their own order.
        seed: seed of the shuffling; the same on all ranks.
        tail: see `share`.

    Attributes:
        epoch: the epoch under way.
        done: the cursor: samples of this epoch that all ranks together have done.
        on_iterate: called when an iteration begins, after what the data loader itself draws from generators.

    Raises:
        ConfigError: a negative length, or an unknown ``tail``.
    """

    def __init__(self, length: int, *, shuffle: bool = True, seed: int = 0, tail: Tail = "pad") -> None:
        if length < 0:
            raise ConfigError("dataset", f"its length is {length}")
        if tail not in ("pad", "drop"):
            raise ConfigError("tail", f"'{tail}' is not a way to end an epoch; use 'pad' or 'drop'")
        self.length = length
        self.shuffle = shuffle
        self.seed = seed
        self.tail: Tail = tail
        self.epoch = 0
        self.done = 0
        self.on_iterate: Callable[[], None] | None = None
        self._iterated = False
        self._start = 0
        self.rank, self.size = 0, 1

    def place(self, rank: int, size: int) -> None:
        """Take a place among the ranks; what is left is dealt out anew."""
        self.rank, self.size = rank, size
        self._begin()

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one goes on."""
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0
            self._begin()

    def record(self, count: int) -> None:
        """Note that every rank has done ``count`` more samples.

        Raises:
            ConfigError: a negative count.
        """
        if count < 0:
            raise ConfigError("batch_size", f"{count} samples can't have been done")
        self.done = min(self.length, self.done + count * self.size)

    @property
    def rounds(self) -> int:
        """How many samples this rank was given when the iteration, or its place, was last begun."""
        left = self.length - self._start
        return left // self.size if self.tail == "drop" else math.ceil(left / self.size)

    @property
    def padding(self) -> int:
        """How many samples the ranks together repeat at the end of this pass over the epoch."""
        return max(0, self.rounds * self.size - (self.length - self._start))

    @property
    def dropped(self) -> int:
        """How many samples at the end of this pass over the epoch no rank sees."""
        return max(0, self.length - self._start - self.rounds * self.size)

    def tail_report(self) -> dict[str, int]:
        """How the end of this pass over the epoch is evened out."""
        return {"epoch": self.epoch, "padding": self.padding, "dropped": self.dropped}

    def remaining(self) -> Indices:
        """The samples that no rank has done: int64, in order."""
        return self._left(self.done)

    def begin(self) -> Indices:
        """Begin an iteration: this rank's samples from the cursor on.

        An epoch that has been gone through and is begun again without `set_epoch` starts from its first
        sample; but the first iteration after a restore goes on from the cursor, even if nothing is left.
        """
        if self._iterated and self.length - self.done < (self.size if self.tail == "drop" else 1):
            self.done = 0
        self._iterated = True
        self._start = self.done
        return share(self._left(self.done), self.rank, self.size, self.tail)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it counts in."""
        return {"epoch": self.epoch, "processed_num": self.done, "length": self.length, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any], name: str = "sampler") -> None:
        """Go to a cursor.

        Args:
            state: what `state_dict` gave; ``length`` and ``seed`` may be missing.
            name: what the sampler is called in an error.

        Raises:
            MismatchError: the data set has another length, or the order another seed, than when it was saved.
        """
        for fact, mine in (("length", self.length), ("seed", self.seed)):
            if state.get(fact, mine) != mine:
                raise MismatchError(
                    name, [f"{name}: the commit's cursor counts in a data set of {fact} {state[fact]}, not {mine}"]
                )
        self.epoch = int(state["epoch"])
        self.done = min(self.length, int(state["processed_num"]))
        self._begin()

    def _begin(self) -> None:
        self._start = self.done
        self._iterated = False

    def _left(self, start: int) -> Indices:
        if self.shuffle:
            return permutation(self.length, self.seed, self.epoch)[start:]
        return np.arange(start, self.length, dtype=np.int64)
