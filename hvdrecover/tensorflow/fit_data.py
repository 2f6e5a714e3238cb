"""The data of a plain ``model.fit``: Keras's own adapters, with iterations that begin at a place of the fit.

The place is an epoch and a number of batches that are done. Each rank has its own data, so each goes to the
place in its own order:

- Arrays, and the batches of a `PyDataset`, are shuffled by a seed and the epoch: any process can go anywhere.
- A ``tf.data`` pipeline is read from its beginning, and what comes before the place is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.trainers.data_adapters import array_slicing, get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from hvdrecover.data.order import Indices, permutation
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.dataset import untuned

Seeded = Callable[[int, Callable[[], None]], None]
"""Calls a function while the global random generators are seeded by a number."""


def resumable(
    x: Any, options: dict[str, Any], epochs: int, seed: Callable[[], int], seeded: Seeded
) -> Resumable:
    """Return the data of a ``fit`` of so many epochs in a form that can begin at any place.

    ``options`` are arguments of ``fit``; ``seed`` returns the seed of this rank's shuffling. ``seeded`` calls
    what a `PyDataset` does between two epochs, such as a shuffle of its samples.
    """
    names = ("y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    given, steps = {name: options[name] for name in names}, options["steps_per_epoch"]
    if isinstance(x, tf.data.Dataset):
        return _Pipeline(get_data_adapter(x, **given), steps, epochs)
    if can_convert_arrays((x, options["y"], options["sample_weight"])):
        return _Arrays(get_data_adapter(x, **given), steps, options["shuffle"], seed)
    if not isinstance(x, PyDataset) or x.num_batches is None:
        raise ConfigError(
            "model.fit",
            f"a {type(x).__name__} as data has no place to which a restarted process could go; pass arrays, "
            "a keras.utils.PyDataset of known length or a tf.data.Dataset",
        )
    if steps not in (None, x.num_batches):
        raise ConfigError(
            "steps_per_epoch", f"it is {steps}, and the data have {x.num_batches} batches; leave it out"
        )
    return _Batches(x, options, seed, seeded)


class Resumable(DataAdapter):  # type: ignore[misc]
    """Data whose next iteration begins at a place; Keras takes it as it is.

    Attributes:
        steps: batches of an epoch; None if there is no end.
        is_counted: whether an iteration can begin inside an epoch. Else only its ends are places.
        costs: a line on what a resumption costs; empty if it costs nothing.
        num_batches: batches until Keras makes another iterator; None if Keras makes no other one.
    """

    steps: int | None
    is_counted = True
    costs = ""
    num_batches: int | None = None
    batch_size = has_partial_batch = partial_batch_size = None

    def go_to(self, epoch: int, batch: int) -> None:
        """Have the next iteration begin at a batch of an epoch, counted from the first epoch of this fit."""

    def get_tf_dataset(self) -> tf.data.Dataset:
        raise NotImplementedError


class _Arrays(Resumable):
    """Arrays. With ``steps_per_epoch``, epochs follow each other in the passes over the samples."""

    def __init__(
        self, arrays: ArrayDataAdapter, steps: int | None, shuffle: Any, seed: Callable[[], int]
    ) -> None:
        self._arrays, self._shuffle, self._seed = arrays, shuffle, seed
        self._pass = self._first = 0
        self.num_batches = None if steps else arrays.num_batches
        self.steps: int = steps or arrays.num_batches

    def go_to(self, epoch: int, batch: int) -> None:
        self._pass, self._first = divmod(epoch * self.steps + batch, self._arrays.num_batches)

    def _indices(self) -> Iterator[Indices]:
        size, samples = self._arrays.batch_size, self._arrays._num_samples
        number, first = self._pass, self._first
        while True:
            order = _order(samples, self._seed(), number, self._shuffle)
            for start in range(first * size, samples, size):
                yield order[start : start + size]
            if self.num_batches is not None:
                return
            number, first = number + 1, 0

    def get_tf_dataset(self) -> tf.data.Dataset:
        length = None if self._arrays.has_partial_batch else self._arrays.batch_size
        indices = tf.data.Dataset.from_generator(
            self._indices, output_signature=tf.TensorSpec([length], tf.int64)
        )
        arrays = array_slicing.convert_to_sliceable(self._arrays._inputs, target_backend="tensorflow")
        inputs = tf.data.Dataset.from_tensors(tree.lists_to_tuples(arrays)).repeat()
        batches = tf.data.Dataset.zip((indices, inputs)).map(_taken, tf.data.AUTOTUNE)
        return untuned(batches.prefetch(tf.data.AUTOTUNE))


def _order(length: int, seed: int, number: int, shuffle: Any) -> Indices:
    return permutation(length, seed, number) if shuffle else np.arange(length, dtype=np.int64)


def _taken(indices: tf.Tensor, arrays: Any) -> Any:
    def take(part: Any) -> Any:
        if isinstance(part, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(part, indices)
        return tf.gather(part, indices) if tf.is_tensor(part) else None

    return tree.traverse(take, arrays)


class _Pipeline(Resumable):
    """A ``tf.data`` pipeline. With ``steps_per_epoch``, one iteration covers all epochs."""

    costs = (
        "after a fault, its tf.data pipeline begins again, and what comes before the place is read and "
        "thrown away. Write shuffle(..., seed=0, reshuffle_each_iteration=False): in another order, samples "
        "of one epoch may come twice or not at all"
    )

    def __init__(self, adapter: TFDatasetAdapter, steps: int | None, epochs: int) -> None:
        length = int(adapter._dataset.cardinality())
        if steps is not None and 0 <= length < steps * epochs:
            raise ConfigError(
                "steps_per_epoch",
                f"{epochs} epochs of {steps} batches are more than the {length} batches of the data set, so "
                "Keras cuts epochs short; add .repeat() to it, or leave steps_per_epoch out",
            )
        self._steps, self._data = steps, _Skipping(adapter._dataset)
        self.steps = steps or (length if length >= 0 else None)
        self.num_batches = self.steps if steps is None else None
        if steps is None and length == tf.data.UNKNOWN_CARDINALITY:
            self.is_counted = False
            self.costs = "after a fault, its epoch begins again, as its tf.data pipeline has no known length"

    def go_to(self, epoch: int, batch: int) -> None:
        self._data.first = batch if self._steps is None else epoch * self._steps + batch

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self._data


class _Skipping(tf.data.Dataset):  # type: ignore[misc]
    """A data set whose iterations begin at batch ``first``."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset, self.first = dataset, 0
        super().__init__(dataset._variant_tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset.skip(self.first) if self.first else self._dataset)

    @property
    def element_spec(self) -> Any:
        return self._dataset.element_spec

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]


class _Batches(Resumable):
    """The batches of a ``PyDataset``."""

    def __init__(
        self, dataset: PyDataset, options: dict[str, Any], seed: Callable[[], int], seeded: Seeded
    ) -> None:
        self._dataset, self._seed, self._seeded = dataset, seed, seeded
        self._shuffle, self._class_weight = options["shuffle"], options["class_weight"]
        self._begun = 0  # how many epochs the data set has begun
        self._adapter = PyDatasetAdapter(dataset, self._class_weight)
        self._spec = self._adapter.get_tf_dataset().element_spec
        self.steps = self.num_batches = dataset.num_batches

    def go_to(self, epoch: int, batch: int) -> None:
        """Have the data set begin all epochs up to this one, as it may shuffle its samples in each."""
        self.on_epoch_end()
        while self._begun <= epoch:
            self._seeded(self._begun, self._begin)
            self._begun += 1
        order = _order(self._dataset.num_batches, self._seed(), epoch, self._shuffle)
        # A new adapter: the last one may have fetched batches for an iteration that a fault has ended.
        self._adapter = PyDatasetAdapter(_Rest(self._dataset, order[batch:]), self._class_weight)

    def _begin(self) -> None:
        self._dataset.on_epoch_end()  # Keras calls it also before the first epoch
        self._dataset.on_epoch_begin()

    def get_tf_dataset(self) -> tf.data.Dataset:
        data = tf.data.Dataset.from_generator(
            lambda: self._adapter._get_iterator(), output_signature=self._spec
        )
        has_workers = self._adapter.enqueuer is not None  # they fetch ahead
        return untuned(data if has_workers else data.prefetch(tf.data.AUTOTUNE))

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Keras does not call this for an epoch that ends early."""
        if self._adapter._within_epoch:
            self._adapter.on_epoch_end()


class _Rest(PyDataset):  # type: ignore[misc]
    """The batches of a data set in an order."""

    def __init__(self, dataset: PyDataset, order: Indices) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._order[index])]
