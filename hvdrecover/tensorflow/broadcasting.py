"""Horovod's broadcasts of variables, for those of Keras 3, too; and of what TensorFlow 2 has no longer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as hvd

from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.variables import Variable, raw


def broadcast_variables(
    variables: Iterable[Variable],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> Any:
    """Give variables the values that they have on one rank.

    Args:
        variables: TensorFlow's or Keras's; the same on all ranks.
        root_rank: the rank that sends.
        process_set: of ranks that take part.
        inplace: send without a copy.

    Examples:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> done = recover.broadcast_variables([weights], root_rank=0)
    """
    return hvd.broadcast_variables([raw(each) for each in variables], root_rank, process_set, inplace)


def broadcast_(
    variables: Iterable[Variable],
    root_rank: int,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Give variables the values that they have on one rank, without a copy.

    Args:
        variables: see `broadcast_variables`, as for all but the name.
        root_rank: see there.
        name: of the collective.
        process_set: see there.

    Examples:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> done = recover.broadcast_([weights], root_rank=0)
    """
    return hvd.broadcast_([raw(each) for each in variables], root_rank, name, process_set)


class BroadcastGlobalVariablesHook:
    """A hook of TensorFlow 1's sessions, which TensorFlow 2 does not have.

    Raises:
        ConfigError: always.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        raise ConfigError(
            "BroadcastGlobalVariablesHook",
            "TensorFlow 2 has no session hooks; call hvd.broadcast_variables(model.variables, root_rank), or "
            "make a hvd.elastic.TensorFlowState, which brings all ranks to one state",
        )
