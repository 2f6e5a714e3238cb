"""Elastic data sets, which know which samples the job has done; and rank-local iterators."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

from hvdrecover.data.order import Indices, SampleOrder, Tail, rounds
from hvdrecover.errors import ConfigError, PerRankError, StepError, UnsupportedValueError
from hvdrecover.state import rank_local

_iterators = itertools.count()


def elastic_dataset(
    data: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    tail: Tail = "pad",
    transform: Callable[..., Any] | None = None,
) -> ElasticDataset:
    """Deal the samples of an epoch out to the ranks in batches; see `ElasticDataset`.

    Args:
        data: arrays or tensors of the same length, alone or nested in tuples and dicts.
        batch_size: samples in one rank's batch.
        shuffle: whether each epoch has its own order.
        seed: seed of the shuffling; the same on all ranks.
        tail: ``"pad"`` repeats samples so that the last round is full on all ranks, ``"drop"`` leaves it out.
        transform: applied to each batch, by ``tf.data.Dataset.map``. If it has a keyword-only parameter
            ``seed``, that is int32 of shape ``[2]``, for ``tf.random.stateless_*``: each batch's own, and the
            same however often, or by which process, the batch is made.

    Examples:
        >>> dataset = recover.elastic_dataset((np.zeros((100, 8)), np.zeros(100)), batch_size=10)
        >>> len(dataset)  # batches, on one rank
        10
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError("batch_size", f"must be an integer ≥ 1, got {batch_size!r}")
    order = SampleOrder(_length(data), shuffle=shuffle, seed=seed, tail=tail)
    if hvd.is_initialized():
        order.place(hvd.rank(), hvd.size())
    order.batch_size = batch_size
    return ElasticDataset(data, order, batch_size, transform)


class _KnownLength(UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """What `map` and `prefetch` make of an elastic data set; Keras maps the data for ``class_weight``."""

    def __init__(self, made: Any, source: Any) -> None:
        super().__init__(made, made._variant_tensor)
        self._source = source

    def cardinality(self) -> tf.Tensor:
        return self._source.cardinality()

    def map(self, *arguments: Any, **options: Any) -> tf.data.Dataset:
        return _KnownLength(super().map(*arguments, **options), self._source)

    def prefetch(self, *arguments: Any, **options: Any) -> tf.data.Dataset:
        return _KnownLength(super().prefetch(*arguments, **options), self._source)


class ElasticDataset(_KnownLength):
    """A ``tf.data`` data set of one rank's batches; made by `elastic_dataset`.

    Track it as an attribute of a state. In your own loop, call `set_epoch` for each epoch and
    `record_batch` after each batch; with ``model.fit``, the callbacks do that. Then each sample of an epoch
    counts exactly once, also if ranks are lost or the job starts again. An iteration resumes from the cursor
    of the recorded batches, so it is safe to prefetch.

    Attributes:
        order: the sample order and the cursor.
        batch_size: samples in one rank's batch; the last one of an epoch may have fewer.
    """

    def __init__(
        self, data: Any, order: SampleOrder, batch_size: int, transform: Callable[..., Any] | None
    ) -> None:
        self.order, self.batch_size = order, batch_size
        self._virtual: Sequence[int] | None = None  # ranks whose batches are dealt in turn; None: this rank
        spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([2], tf.int32)
        numbers = tf.data.Dataset.from_generator(self._batches, output_signature=spec)
        made = numbers.map(_maker(data, transform), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        pipeline = untuned(made.prefetch(tf.data.AUTOTUNE))
        super().__init__(pipeline, self)

    def __iter__(self) -> Iterator[Any]:
        self._refuse_virtual("iterate over state.steps(dataset)")
        return self.batches(None)

    def batches(self, ranks: Sequence[int] | None) -> Iterator[Any]:
        """Iterate over the remaining batches of the epoch, of ``ranks`` in turn; None: of this rank."""
        self._virtual = ranks
        return super().__iter__()  # type: ignore[no-any-return]

    def cardinality(self) -> tf.Tensor:
        """Number of batches in a whole epoch, even if a resumed one has fewer.

        Keras uses the number from the first epoch for all epochs, and the first may be a resumed one.
        """
        samples = rounds(self.order.length, self.order.size, self.order.tail)
        return tf.constant(math.ceil(samples / self.batch_size), tf.int64)

    @property
    def is_done(self) -> bool:
        """Return whether all samples of this epoch are done."""
        return rounds(self.order.left, self.order.size, self.order.tail) == 0

    def record_batch(self, batches: int = 1) -> None:
        """Note that every rank has done so many batches. With virtual ranks, the state does that."""
        self._refuse_virtual("remove record_batch(): state.steps() counts samples")
        self.order.record(batches * self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one continues."""
        self.order.set_epoch(epoch)

    def _refuse_virtual(self, remedy: str) -> None:
        if self.order.dealt_to is not None:
            raise StepError("dataset", f"its samples are dealt out to virtual ranks; {remedy}")

    def _batches(self) -> Iterator[tuple[Indices, npt.NDArray[np.int32]]]:
        """Begin an iteration at the cursor: yield the samples of each batch, and its seed."""
        order = self.order
        # An iteration does not move the cursor; `record_batch` does. So batches may be prefetched, and after
        # a fault a new iteration continues at the cursor of the commit.
        order.begin()
        first, ranks = order.done, (order.rank,) if self._virtual is None else self._virtual
        shares = [order.share_of(rank) for rank in ranks]
        for start in range(0, order.rounds, self.batch_size):
            position = order.position(first, start)
            for rank, share in zip(ranks, shares, strict=True):
                # The seed of a batch depends on its place in the order, not on the process that makes it.
                facts = [order.seed % 2**64, order.epoch, position, rank]
                seed = np.random.SeedSequence(facts).generate_state(2).view(np.int32)
                yield share[start : start + self.batch_size], seed


def _maker(data: Any, transform: Callable[..., Any] | None) -> Callable[[tf.Tensor, tf.Tensor], Any]:
    """Return a function that makes a batch of samples by their numbers and the seed of the batch."""
    tensors = tf.nest.map_structure(tf.convert_to_tensor, data)
    try:
        parameter = inspect.signature(transform).parameters.get("seed") if transform is not None else None
    except (TypeError, ValueError):  # Python may not know the signature of a built-in function
        parameter = None
    is_seeded = parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY

    def make(samples: tf.Tensor, seed: tf.Tensor) -> Any:
        batch = tf.nest.map_structure(lambda tensor: tf.gather(tensor, samples), tensors)
        if transform is None:
            return batch
        given = batch if isinstance(batch, tuple) else (batch,)
        return transform(*given, seed=seed) if is_seeded else transform(*given)

    return make


def _length(data: Any) -> int:
    lengths = set()
    for each in [data] if isinstance(data, tf.data.Dataset) else tf.nest.flatten(data):
        if not (shape := tuple(getattr(each, "shape", ()))):
            raise ConfigError(
                "dataset",
                f"expected arrays or tensors, got a {type(each).__name__}, which has no first axis of "
                "samples to deal out. If it makes samples or batches, pass the arrays that it reads, or "
                "their indices, and make the batches in transform=; or keep iter(dataset) of a tf.data "
                "data set in a PerRank",
            )
        lengths.add(int(shape[0]))
    if len(lengths) != 1:
        raise ConfigError("dataset", f"its arrays have no common length, but {sorted(lengths)}")
    return lengths.pop()


def untuned(data: tf.data.Dataset) -> tf.data.Dataset:
    # TensorFlow's thread that tunes a pipeline may miss that its iterator ends. One of ten iterators took
    # seconds to end, up to 10 in a test, and up to a minute by the code. Meanwhile the process stands still
    # in the middle of a recovery, of a garbage collection or of its exit.
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.with_options(options)


class PerRank(rank_local.PerRank):
    """A value of this rank's own; see `hvdrecover.state.rank_local.PerRank`.

    It may be an iterator of a ``tf.data`` data set: a commit holds what ``tf.train.Checkpoint`` writes of it,
    with the content of its shuffle buffers. At the end of an epoch, assign a new iterator to ``value``; with
    virtual ranks, the function that makes iterators is called again.

    Examples:
        >>> batches = recover.PerRank(iter(tf.data.Dataset.range(6).batch(2)))
        >>> next(iter(batches)).numpy().tolist()
        [0, 1]
    """

    def stateful(self, value: Any) -> Any:
        """Return the object with the state of a value."""
        if isinstance(value, tf.data.Dataset):
            raise ConfigError("PerRank", "a data set has no place of its own; pass iter(dataset)")
        return _IteratorState(value) if isinstance(value, tf.data.Iterator) else super().stateful(value)

    def ended(self, rank: int) -> None:
        """The iterator of a virtual rank has ended: make it a new one."""
        one = self._each.get(rank)
        if one is not None and isinstance(one.value, tf.data.Iterator):
            del self._each[rank]
            self._of(rank).place = one.place


class _IteratorState:
    """The state of an iterator, as the files of a TensorFlow checkpoint in memory: bytes by suffix."""

    def __init__(self, iterator: tf.data.Iterator) -> None:
        self._checkpoint = tf.train.Checkpoint(iterator=iterator)
        self._folder = f"ram://hvdrecover/{os.getpid()}/{next(_iterators)}"
        self._prefix = f"{self._folder}/iterator"

    def state_dict(self) -> dict[str, bytes]:
        try:
            self._checkpoint.write(self._prefix)
            names = [name.removeprefix("iterator") for name in tf.io.gfile.listdir(self._folder)]
            return {name: tf.io.gfile.GFile(self._prefix + name, "rb").read() for name in names}
        except tf.errors.FailedPreconditionError as error:
            raise UnsupportedValueError(
                "PerRank",
                f"TensorFlow can't save an iterator of this pipeline ({error.message}). Make it without "
                "Python functions, generators and tf.random, or have an elastic_dataset in the state",
            ) from error
        finally:
            tf.io.gfile.rmtree(self._folder)

    def load_state_dict(self, files: dict[str, bytes]) -> None:
        tf.io.gfile.makedirs(self._folder)
        try:
            for suffix, content in files.items():
                with tf.io.gfile.GFile(self._prefix + suffix, "wb") as file:
                    file.write(content)
            self._checkpoint.read(self._prefix).assert_consumed()
        except (tf.errors.OpError, AssertionError) as error:
            raise PerRankError(
                "PerRank", f"the iterator can't be set to its state; it needs the same pipeline: {error}"
            ) from error
        finally:
            tf.io.gfile.rmtree(self._folder)
