"""A count of each collective of gradients that this rank took part in; and taking part without any.

A rank that fails in the midst of a step leaves the others waiting. It can release them: by gradients of which
none is finite, so that all see a bad step. What it need not have sent, the others send as well later on.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.elastic.companions import Observer
from hvdrecover.tensorflow.own_gradients import own
from hvdrecover.tensorflow.variables import counter
from hvdrecover.tensorflow.world import TensorFlowWorld


@dataclass(frozen=True)
class Blank:
    """A tensor to send in the place of another.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        value: all of its elements.
    """

    dtype: tf.DType
    shape: Sequence[int]
    value: float = math.nan

    def tensor(self) -> tf.Tensor:
        """The tensor."""
        return tf.fill(list(self.shape), tf.cast(self.value, self.dtype))


class Sent:
    """The collectives of this process; they are counted if a guard looks at gradients."""

    def __init__(self) -> None:
        self._counts: dict[str, tf.Variable] = {}
        self._blanks: dict[str, _Blanks] = {}
        self._pending: list[tuple[_Blanks, _Sending]] = []

    def through(
        self,
        name: str,
        collective: Callable[[list[tf.Tensor]], Any],
        tensors: list[tf.Tensor],
        blanks: Sequence[Blank],
    ) -> Any:
        """Send tensors through a collective, and count it right before.

        Args:
            name: the collective's.
            collective: takes the tensors.
            tensors: what to send.
            blanks: what to send when there is nothing to be sent.
        """
        if not own.wanted:
            return collective(tensors)
        self._blanks[name] = _Blanks(name, collective, blanks, in_graph=tf.inside_function())
        with tf.control_dependencies(tensors):
            number = self._count(name).assign_add(1)
        with tf.control_dependencies([] if tf.executing_eagerly() else [number]):
            return collective(tensors)

    @property
    def knows(self) -> bool:
        """Return whether it is known what others may wait for; eagerly it isn't before the first step."""
        return bool(self._blanks)

    def begin(self) -> None:
        """Forget what was sent before."""
        self._blanks.clear()

    def forget(self) -> None:
        """Begin to count anew, after a rendezvous."""
        for count in self._counts.values():
            count.assign(0)
        self._pending.clear()

    def counts(self) -> dict[str, int]:
        """Return how often this rank has taken part since the last rendezvous, by name."""
        return {name: int(count) for name, count in self._counts.items()}

    def release(self) -> None:
        """Send blanks for whatever the other ranks may wait for; `settle` has to follow."""
        for blanks in self._blanks.values():
            self._send(blanks)

    def settle(self) -> list[dict[str, int]]:
        """All ranks have come to an end of the step, and send blanks until all have sent as much.

        Returns:
            By rank, how often it had taken part before.

        Raises:
            Exception: a collective failed, as ranks were lost.
        """
        mine = self.counts()
        pending = [blanks.name for blanks, _ in self._pending]
        before = {name: count - pending.count(name) for name, count in mine.items()}
        rows = gather_json(_World(), [mine, before], "hvdrecover.gradients.sent")
        for name, blanks in self._blanks.items():
            for _ in range(max(counts.get(name, 0) for counts, _ in rows) - mine.get(name, 0)):
                self._send(blanks)
        sendings, self._pending = [sending for _, sending in self._pending], []
        for sending in sendings:
            sending.wait()
        return [counts for _, counts in rows]

    def _send(self, blanks: _Blanks) -> None:
        self._count(blanks.name).assign_add(1)
        earlier = [sending for other, sending in self._pending if other.channel == blanks.channel]
        self._pending.append((blanks, _Sending(blanks, earlier[-1] if earlier else None)))

    def _count(self, name: str) -> tf.Variable:
        if name not in self._counts:
            self._counts[name] = counter()
        return self._counts[name]


class _Blanks:
    """The blanks to send through one collective instead of gradients.

    Attributes:
        name: the collective's.
        channel: of two of one channel, one has to wait for the other.
    """

    def __init__(
        self,
        name: str,
        collective: Callable[[list[tf.Tensor]], Any],
        blanks: Sequence[Blank],
        *,
        in_graph: bool,
    ) -> None:
        self.name = name
        # Outside of graphs Horovod calls all collectives of one kind the same.
        self.channel = name if in_graph else ""
        self._collective = collective
        self._blanks = blanks

    def send(self) -> None:
        """Take part in the collective; returns when all ranks have."""
        tensors = [blank.tensor() for blank in self._blanks]
        # As arguments: TensorFlow would try what is done with constants while it makes the graph.
        (tf.function(self._collective, autograph=False) if self.channel else self._collective)(tensors)


class _Sending:
    """A collective on a thread of its own: nobody may be waiting for it yet.

    On such a thread TensorFlow does not check numbers either, which it is told to for each thread.
    """

    def __init__(self, blanks: _Blanks, previous: _Sending | None) -> None:
        self._blanks = blanks
        self._previous = previous
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="hvdrecover-blank", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all ranks have taken part.

        Raises:
            Exception: it failed.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            if self._previous is not None:
                self._previous.wait()
            self._blanks.send()
        except Exception as error:
            self._failure = error


class _World(TensorFlowWorld):
    """The ranks; their values are gathered under a name of its own, which needs a graph."""

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """Everybody's arrays one after another, joined along the first axis; the lengths there may differ."""

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def gather(mine: tf.Tensor) -> tf.Tensor:
            return hvd.allgather(mine, name=name, ignore_name_scope=True)

        with tf.device("CPU:0"):
            joined: npt.NDArray[np.int64] = gather(tf.constant(mine)).numpy()
        return joined


sent = Sent()


class ForgetSent(Observer):
    """Forgets what was sent before the ranks agreed on a state."""

    def agreed(self, agreement: Agreement) -> None:
        """Forget it."""
        sent.forget()
