"""Data sets that know which samples the job has done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover import config
from hvdrecover.data.order import SampleOrder, Tail, rounds
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.dealt import Dealt
from hvdrecover.tensorflow.steps import Steps

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
        transform: applied to each batch, by ``tf.data.Dataset.map``.

    Raises:
        ConfigError: data of no common or no known length, a data set that is to be shuffled, a batch size
            below 1, or an unknown ``tail``.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError("batch_size", f"{batch_size!r} is not a number of samples from 1 on")
    order = SampleOrder(_length(data, shuffle), shuffle=shuffle, seed=seed, tail=tail)
    if hvd.is_initialized():
        order.place(hvd.rank(), hvd.size())
    batches = _of_dataset if isinstance(data, tf.data.Dataset) else _of_arrays
    pipeline = batches(data, order, batch_size)
    if transform is not None:
        pipeline = pipeline.map(transform, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    dealt = Dealt() if config.read().drill is not None else None
    if dealt is not None:
        pipeline = dealt.follow(pipeline)
    made = ElasticDataset(pipeline.prefetch(tf.data.AUTOTUNE).with_options(_untuned()), order, batch_size)
    made.dealt = dealt
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
        dealt: what it has dealt; None outside of drills.
    """

    dealt: Dealt | None = None

    def __init__(self, pipeline: tf.data.Dataset, order: SampleOrder, batch_size: int) -> None:
        self._pipeline = pipeline
        self.order = order
        self.batch_size = batch_size
        super().__init__(pipeline._variant_tensor)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over what is left of the epoch."""
        iterator: Iterator[Any] = super().__iter__()
        steps = self.__dict__.get("_steps")
        return steps.timed(iterator) if steps is not None and tf.executing_eagerly() else iterator

    def watch(self, steps: Steps) -> None:
        """Have each batch that a loop in Python takes told of."""
        self.__dict__["_steps"] = steps

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
        """Note that every rank has done so many batches."""
        self.order.record(batches * self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. Naming the epoch under way changes nothing, so that a resumed one continues."""
        self.order.set_epoch(epoch)


def _untuned() -> tf.data.Options:
    """Options that keep TensorFlow from tuning a pipeline while it runs.

    The thread that tunes may miss that its iterator ends, as it is woken before it can see that: one of ten
    iterators took seconds to end, up to 10 in a test and a minute by the code, in which the process stands
    still in the middle of a recovery, of a garbage collection or of its exit.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return options


def _of_arrays(data: Any, order: SampleOrder, batch_size: int) -> tf.data.Dataset:
    tensors = tf.nest.map_structure(tf.convert_to_tensor, data)

    def batches() -> Iterator[Indices]:
        indices = order.begin()
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]

    numbers = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None], tf.int64))

    def look_up(indices: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), tensors)

    return numbers.map(look_up)


def _of_dataset(data: tf.data.Dataset, order: SampleOrder, batch_size: int) -> tf.data.Dataset:
    def place() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order.begin()
        runs = np.array(order.runs(), dtype=np.int64).reshape(-1, 2)
        return runs, np.array([order.rank, order.size], dtype=np.int64)

    def samples(_: tf.Tensor) -> tf.data.Dataset:
        runs, mine = tf.numpy_function(place, [], (tf.int64, tf.int64))
        runs.set_shape([None, 2])
        mine.set_shape([2])
        pieces = tf.data.Dataset.from_tensor_slices(runs)
        return pieces.flat_map(lambda run: data.skip(run[0]).take(run[1])).shard(mine[1], mine[0])

    return tf.data.Dataset.from_tensors(0).flat_map(samples).batch(batch_size)


def _length(data: Any, shuffle: bool) -> int:
    if isinstance(data, tf.data.Dataset):
        if shuffle:
            raise ConfigError(
                "dataset",
                "samples of a tf.data data set can't be looked up by number, so it can't be shuffled here; "
                "pass shuffle=False, or arrays",
            )
        length = int(data.cardinality())
        if length < 0:
            raise ConfigError(
                "dataset",
                "its number of samples is unknown or infinite; say it by "
                "dataset.apply(tf.data.experimental.assert_cardinality(n))",
            )
        return length
    shapes = [np.shape(each) for each in tf.nest.flatten(data)]
    if () in shapes:
        raise ConfigError("dataset", "a single number has no length, so it can't be dealt out")
    lengths = {shape[0] for shape in shapes}
    if len(lengths) != 1:
        raise ConfigError("dataset", f"its arrays have no common length, but {sorted(lengths)}")
    return int(lengths.pop())


def datasets(contents: Contents) -> list[ElasticDataset]:
    """Return the elastic data sets among a state's attributes."""
    return [each for each in contents.values.values() if isinstance(each, ElasticDataset)]
