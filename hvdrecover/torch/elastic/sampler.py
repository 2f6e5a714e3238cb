"""A sampler that knows which samples the job has done."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic.sampler as _hvd
import torch.utils.data

from hvdrecover.data.order import SampleOrder, Tail
from hvdrecover.errors import ConfigError, StepError
from hvdrecover.stand_in import standing_in

_PIECE = 4096  # indices turned into Python ints at a time

__getattr__, __dir__ = standing_in(_hvd, globals())


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals the samples of an epoch out to the ranks, and deals the rest out again when ranks come or go.

    Track it by a `TorchState`, call `record_batch` after each batch and `set_epoch` for each epoch. The
    rest of an epoch after a commit is then used exactly once, whatever happens in between. An
    iteration resumes from the cursor, so a data loader may prefetch at will.

    Args:
        dataset: anything of a constant length.
        shuffle: whether each epoch has an order of its own.
        seed: seed of the shuffling; the same on all ranks.
        tail: ``"pad"`` repeats samples so that the last round is full on all ranks, ``"drop"`` leaves it out.

    Attributes:
        order: the sample order and the cursor.
        epoch: the epoch under way.
        processed_num: how many of its samples all ranks together have done.
        remaining_indices: the samples that no rank has done, in order.
        shuffle, seed: as given.
        num_samples, total_size: how many samples each rank, and all together, were last given.
        rank, num_replicas: this process's place among the ranks, and their number.
        padding: how many samples the ranks together repeat at the end of this epoch.

    Raises:
        ConfigError: the data set has no length, or an unknown ``tail``.

    Examples:
        >>> sampler = recover.ElasticSampler(range(10), shuffle=False)
        >>> sampler.record_batch(0, 4)  # of one rank here
        >>> list(sampler)
        [4, 5, 6, 7, 8, 9]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, tail: Tail = "pad") -> None:
        super().__init__()
        try:
            length = len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(
                "dataset", f"a {type(dataset).__name__} has no length, so it can't be dealt out"
            ) from error
        self.dataset = dataset
        self.order = SampleOrder(length, shuffle=shuffle, seed=seed, tail=tail)
        if hvd.is_initialized():
            self.reset()

    def __iter__(self) -> Iterator[int]:
        self._refuse_virtual("iterate over state.steps(loader)")
        # A generator, so that this runs when the first index is asked for: after a data loader has drawn its
        # own seed from the global generator.
        indices = self.order.begin()
        if self.order.on_iterate is not None:
            self.order.on_iterate()
        for start in range(0, len(indices), _PIECE):
            yield from indices[start : start + _PIECE].tolist()
        self.order.end()

    def __len__(self) -> int:
        return self.order.rounds

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has done a batch.

        Args:
            batch_idx: not used; Horovod's sampler takes it too.
            batch_size: samples in one rank's batch.

        Raises:
            StepError: the state has virtual ranks, and counts samples by itself.
        """
        self._refuse_virtual("remove record_batch(): state.steps() counts samples")
        self.order.record(batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one continues."""
        self.order.set_epoch(epoch)

    def reset(self) -> None:
        """Take this process's present place among the ranks."""
        self.order.place(hvd.rank(), hvd.size())

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its samples all ranks together have done."""
        return self.order.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken, at this process's present place among the ranks."""
        self.order.load_state_dict(state_dict)
        if hvd.is_initialized():
            self.reset()

    def _refuse_virtual(self, remedy: str) -> None:
        if self.order.dealt_to is not None:
            raise StepError("sampler", f"its samples are dealt out to virtual ranks; {remedy}")

    # As Horovod's sampler has them.
    epoch = property(lambda self: self.order.epoch)
    processed_num = property(lambda self: self.order.done)
    remaining_indices = property(lambda self: self.order.remaining().tolist())
    shuffle = property(lambda self: self.order.shuffle)
    seed = property(lambda self: self.order.seed)
    num_samples = property(lambda self: self.order.rounds)
    total_size = property(lambda self: self.order.rounds * self.order.size)
    rank = property(lambda self: self.order.rank)
    num_replicas = property(lambda self: self.order.size)
    padding = property(lambda self: max(0, self.order.padding))
