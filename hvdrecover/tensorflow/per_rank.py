"""Iterators of ``tf.data``, as each rank's own."""

from __future__ import annotations

import itertools
import os
from typing import Any

import tensorflow as tf

from hvdrecover.errors import ConfigError, PerRankError, UnsupportedValueError
from hvdrecover.state import rank_local

_numbers = itertools.count()


class PerRank(rank_local.PerRank):
    """A value of this rank's own; see `hvdrecover.state.rank_local.PerRank`.

    It may be an iterator of a ``tf.data`` data set: a commit holds what ``tf.train.Checkpoint`` writes of it,
    with the content of its shuffle buffers. At the end of an epoch, assign a new iterator to ``value``; with
    virtual ranks, the function that makes iterators is called again.

    Raises:
        ConfigError: a data set, which has no place of its own.

    Examples:
        >>> batches = recover.PerRank(iter(tf.data.Dataset.range(6).batch(2)))
        >>> next(iter(batches)).numpy().tolist()
        [0, 1]
    """

    def stateful(self, value: Any) -> Any:
        """Return what gives and takes the state of a value."""
        if isinstance(value, tf.data.Dataset):
            raise ConfigError("PerRank", "a data set has no place of its own; pass iter(dataset)")
        return _State(value) if isinstance(value, tf.data.Iterator) else super().stateful(value)

    def ended(self, rank: int) -> None:
        """The iterator of a virtual rank has ended: make it a new one."""
        one = self._each.get(rank)
        if one is not None and isinstance(one.value, tf.data.Iterator):
            del self._each[rank]
            self._of(rank).place = one.place


class _State:
    """The state of an iterator, as the files of a TensorFlow checkpoint in memory: bytes by suffix."""

    def __init__(self, iterator: tf.data.Iterator) -> None:
        self._checkpoint = tf.train.Checkpoint(iterator=iterator)
        self._folder = f"ram://hvdrecover/{os.getpid()}/{next(_numbers)}"
        self._prefix = f"{self._folder}/iterator"

    def state_dict(self) -> dict[str, bytes]:
        """Return the files.

        Raises:
            UnsupportedValueError: TensorFlow can't save such an iterator.
        """
        try:
            self._checkpoint.write(self._prefix)
            names = tf.io.gfile.listdir(self._folder)
            return {name.removeprefix("iterator"): self._read(f"{self._folder}/{name}") for name in names}
        except tf.errors.FailedPreconditionError as error:
            raise UnsupportedValueError(
                "PerRank",
                f"TensorFlow can't save an iterator of this pipeline ({error.message}). Make it without "
                "Python functions, generators and tf.random, or have an elastic_dataset in the state",
            ) from error
        finally:
            tf.io.gfile.rmtree(self._folder)

    def load_state_dict(self, files: dict[str, bytes]) -> None:
        """Set the iterator to a state of one of the same pipeline.

        Raises:
            PerRankError: the pipeline is another.
        """
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

    @staticmethod
    def _read(path: str) -> bytes:
        with tf.io.gfile.GFile(path, "rb") as file:
            content: bytes = file.read()
        return content
