"""Data sets that know which samples the job has done."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.data.order import SampleOrder, Tail, rounds
from hvdrecover.errors import ConfigError, StepError
from hvdrecover.tensorflow.dealing import Dealing, draws, takes_seed

Indices = npt.NDArray[np.int64]


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
        data: arrays or tensors of the same length, alone or nested in tuples and dicts; or a ``tf.data``
            data set of known cardinality that gives the same samples in the same order each time. A data set
            can't be shuffled by number, so it needs ``shuffle=False``.
        batch_size: samples in one rank's batch.
        shuffle: whether each epoch has an order of its own.
        seed: seed of the shuffling; the same on all ranks.
        tail: ``"pad"`` repeats samples so that the last round is full on all ranks, ``"drop"`` leaves it out.
        transform: applied to each batch, by ``tf.data.Dataset.map``. If it has a keyword-only parameter
            ``seed``, that is int32 of shape ``[2]``, for ``tf.random.stateless_*``: each batch's own, and the
            same however often, or by which process, the batch is made.

    Raises:
        ConfigError: data of no common or no known length, a data set that is to be shuffled, a batch size
            below 1, or an unknown ``tail``.

    Examples:
        >>> dataset = recover.elastic_dataset((np.zeros((100, 8)), np.zeros(100)), batch_size=10)
        >>> len(dataset)  # batches, on one rank
        10
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError("batch_size", f"{batch_size!r} is not a number of samples from 1 on")
    order = SampleOrder(_length(data, shuffle), shuffle=shuffle, seed=seed, tail=tail)
    if hvd.is_initialized():
        order.place(hvd.rank(), hvd.size())
    order.batch_size = batch_size
    dealing = Dealing(order, batch_size)
    pipeline = (_of_dataset if isinstance(data, tf.data.Dataset) else _of_arrays)(data, dealing)
    transformed = _transformed(pipeline, transform)
    made = ElasticDataset(transformed.prefetch(tf.data.AUTOTUNE).with_options(_untuned()), dealing)
    made.draws = functools.partial(draws, transformed)
    return made


class ElasticDataset(tf.data.Dataset):  # type: ignore[misc]
    """A ``tf.data`` data set of one rank's batches; made by `elastic_dataset`.

    Track it as an attribute of a state. In a loop of your own, call `set_epoch` for each epoch and
    `record_batch` after each batch; with ``model.fit``, the callbacks do. What is left of an epoch after a
    commit is then gone through exactly once, whatever happens in between. An iteration resumes from the
    cursor, so batches may be prefetched at will.

    Attributes:
        order: the sample order and the cursor.
        batch_size: samples in one rank's batch; the last one of an epoch may have fewer.
        draws: returns an operation of its transform that draws from a random stream of its own, if one does.
    """

    draws: Callable[[], str | None]

    def __init__(self, pipeline: tf.data.Dataset, dealing: Dealing) -> None:
        self._pipeline = pipeline
        self._dealing = dealing
        self.order = dealing.order
        self.batch_size = dealing.batch_size
        super().__init__(pipeline._variant_tensor)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what is left of the epoch.

        Raises:
            StepError: samples are dealt out to virtual ranks.
        """
        self._refuse_virtual("iterate over state.steps(dataset)")
        return self.batches(None)

    def batches(self, ranks: Sequence[int] | None) -> Iterator[Any]:
        """Return what is left of the epoch, of some virtual ranks in turn; None: of this rank."""
        self._dealing.ranks = ranks
        iterator: Iterator[Any] = super().__iter__()
        return iterator

    @property
    def element_spec(self) -> Any:
        """Return what a batch is made of."""
        return self._pipeline.element_spec

    def cardinality(self) -> tf.Tensor:
        """Number of batches in a whole epoch; one that is resumed has fewer.

        Keras would take the number of the first epoch that it sees for that of all.
        """
        order = self.order
        samples = rounds(order.length, order.size, order.tail)
        return tf.constant(math.ceil(samples / self.batch_size), tf.int64)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._pipeline]

    @property
    def is_done(self) -> bool:
        """Return whether nothing of this epoch is left."""
        order = self.order
        return rounds(order.left, order.size, order.tail) == 0

    def record_batch(self, batches: int = 1) -> None:
        """Note that every rank has done so many batches.

        Raises:
            StepError: the state has virtual ranks, and counts samples by itself.
        """
        self._refuse_virtual("remove record_batch(): state.steps() counts samples")
        self.order.record(batches * self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one continues."""
        self.order.set_epoch(epoch)

    def _refuse_virtual(self, remedy: str) -> None:
        if self.order.dealt_to is not None:
            raise StepError("dataset", f"its samples are dealt out to virtual ranks; {remedy}")


def _untuned() -> tf.data.Options:
    """Options that keep TensorFlow from tuning a pipeline while it runs.

    The thread that tunes may miss that its iterator ends, as it is woken before it can see that: one of ten
    iterators took seconds to end, up to 10 in a test and a minute by the code, in which the process stands
    still in the middle of a recovery, of a garbage collection or of its exit.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


def _of_arrays(data: Any, dealing: Dealing) -> tf.data.Dataset:
    tensors = tf.nest.map_structure(tf.convert_to_tensor, data)

    def look_up(indices: tf.Tensor, seed: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), tensors), seed

    return _generated(dealing.batches, tf.TensorSpec([None], tf.int64), _SEED).map(look_up)


def _of_dataset(data: tf.data.Dataset, dealing: Dealing) -> tf.data.Dataset:
    def place() -> tuple[Indices, Indices, Indices]:
        dealing.order.begin()
        runs = np.array(dealing.order.runs(), dtype=np.int64).reshape(-1, 2)
        return runs, np.array(dealing.of, dtype=np.int64), np.array(dealing.order.size, dtype=np.int64)

    def samples(_: tf.Tensor) -> tf.data.Dataset:
        runs, ranks, size = tf.numpy_function(place, [], (tf.int64, tf.int64, tf.int64))
        runs.set_shape([None, 2])
        ranks.set_shape([None])
        size.set_shape([])
        pieces = tf.data.Dataset.from_tensor_slices(runs)
        dealt = pieces.flat_map(lambda run: data.skip(run[0]).take(run[1]))
        # Each rank's batches in turn; the data is read once for each of them.
        return tf.data.Dataset.from_tensor_slices(ranks).interleave(
            lambda rank: dealt.shard(size, rank).batch(dealing.batch_size),
            cycle_length=tf.size(ranks, tf.int64),
            block_length=1,
        )

    batches = tf.data.Dataset.from_tensors(0).flat_map(samples)
    return tf.data.Dataset.zip((batches, _generated(dealing.seeds, _SEED)))


_SEED = tf.TensorSpec([2], tf.int32)


def _generated(generate: Callable[[], Iterator[Any]], *spec: tf.TensorSpec) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(generate, output_signature=spec if len(spec) > 1 else spec[0])


def _transformed(pipeline: tf.data.Dataset, transform: Callable[..., Any] | None) -> tf.data.Dataset:
    """Batches without their seeds, as they are or as a function makes them."""
    if transform is None:
        return pipeline.map(lambda batch, seed: batch)
    seeded = takes_seed(transform)

    def apply(batch: Any, seed: tf.Tensor) -> Any:
        given = batch if isinstance(batch, tuple) else (batch,)
        return transform(*given, seed=seed) if seeded else transform(*given)

    return pipeline.map(apply, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _length(data: Any, shuffle: bool) -> int:
    if isinstance(data, tf.data.Dataset):
        if shuffle:
            raise ConfigError(
                "dataset",
                "samples of a tf.data data set can't be looked up by number, so it can't be shuffled here; "
                "pass shuffle=False, or arrays",
            )
        if _reshuffles(data):
            raise ConfigError(
                "dataset",
                "its shuffle() gives another order each time, so a resumed epoch would repeat samples and "
                "miss others; write shuffle(..., seed=0, reshuffle_each_iteration=False) and "
                "list_files(..., shuffle=False), or pass arrays",
            )
        length = int(data.cardinality())
        if length < 0:
            raise ConfigError(
                "dataset",
                "its number of samples is unknown or infinite; say it by "
                "dataset.apply(tf.data.experimental.assert_cardinality(n))",
            )
        return length
    lengths = {_length_of(each) for each in tf.nest.flatten(data)}
    if len(lengths) != 1:
        raise ConfigError("dataset", f"its arrays have no common length, but {sorted(lengths)}")
    return int(lengths.pop())


def _length_of(array: Any) -> int:
    shape = tuple(getattr(array, "shape", ()))
    if not shape:
        raise ConfigError(
            "dataset",
            f"expected arrays, tensors or a tf.data data set, got a {type(array).__name__}, which has no "
            "first axis of samples to deal out. If it makes batches, as a PyDataset or a generator does, "
            "pass the arrays that it reads, or their indices, and make the batches in transform=",
        )
    return int(shape[0])


def _reshuffles(data: tf.data.Dataset) -> bool:
    """Return whether a data set, or one that it is made of, is shuffled anew for each iteration."""
    return getattr(data, "_reshuffle_each_iteration", False) or any(map(_reshuffles, data._inputs()))


def part_done(found: Sequence[ElasticDataset]) -> float:
    """Return which part of an epoch is done; of data sets that are trained on together, all have come as far.

    Nothing is done of one that is validated on.
    """
    return max((data.order.done / data.order.length for data in found if data.order.length), default=0.0)


def datasets(attributes: Mapping[str, Any]) -> list[ElasticDataset]:
    """Return the elastic data sets among a state's attributes."""
    return [each for each in attributes.values() if isinstance(each, ElasticDataset)]
