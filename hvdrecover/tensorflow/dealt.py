"""A record of what an elastic data set deals, in a drill.

Its batches are looked at at the end of its own pipeline, so that a drill trains by the very graphs of a real
run: one operation more may change how TensorFlow optimizes a graph, and with it how sums are rounded; a call
of Python keeps it from being compiled by XLA; and a loop in Python has no graph in common with others.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.digest import digest as digest_of


class Dealt:
    """Digests of the batches that a data set has dealt since its last iteration began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # batches are dealt ahead, on threads of TensorFlow's
        self._iteration = 0
        self._digests: dict[int, str] = {}
        self._taken = 0

    def follow(self, pipeline: tf.data.Dataset) -> tf.data.Dataset:
        """The same pipeline, whose batches are taken note of."""

        def iteration(_: tf.Tensor) -> tf.data.Dataset:
            number = tf.numpy_function(self._begin, [], tf.int64)

            def note(place: tf.Tensor, *batch: Any) -> Any:
                flat = tf.nest.flatten(batch, expand_composites=True)
                tensors = [
                    each
                    for each in flat
                    if tf.is_tensor(each) and each.dtype not in (tf.variant, tf.resource)
                ]
                tf.numpy_function(self._note, [number, place, *tensors], [])
                return batch if len(batch) > 1 else batch[0]

            return pipeline.enumerate().map(note)

        return tf.data.Dataset.from_tensors(0).flat_map(iteration)

    def take(self, batches: int) -> str | None:
        """The digest of the next batches, in the order in which they were dealt; None if one is unknown."""
        with self._lock:
            places = range(self._taken, self._taken + batches)
            self._taken += batches
            digests = [self._digests.pop(place, None) for place in places]
        known = [digest for digest in digests if digest is not None]
        return digest_of("".join(known).encode()) if known and len(known) == batches else None

    def _begin(self) -> npt.NDArray[np.int64]:
        with self._lock:
            self._iteration += 1
            self._digests, self._taken = {}, 0
            return np.array(self._iteration, np.int64)

    def _note(self, iteration: int, place: int, *tensors: Any) -> None:
        digest = Digest()
        for tensor in map(np.asarray, tensors):
            digest.update(f"{tensor.dtype}{tensor.shape}".encode())
            digest.update(repr(tensor.tolist()).encode() if tensor.dtype == object else tensor.tobytes())
        with self._lock:
            if iteration == self._iteration:  # an earlier one may still be dealing ahead
                self._digests[int(place)] = digest.hex()
