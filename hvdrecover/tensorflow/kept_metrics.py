"""The metrics of an epoch under way: each rank has its own, and a commit all of them.

An epoch that is resumed continues with them, so that callbacks which judge by it see the whole epoch.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdrecover.tensorflow.state import TensorFlowState

Row = npt.NDArray[np.int64]
"""One rank's metrics: the bytes of their variables, in Keras's order."""


def of_all(model: keras.Model, state: TensorFlowState) -> dict[str, Any]:
    """All ranks' metrics at the state's present epoch and batch; all ranks call it."""
    data = b"".join(each.numpy().tobytes() for each in model.metrics_variables)
    mine = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), np.int64)
    alone = state._world.size() == 1 or not mine.size
    rows = mine[np.newaxis] if alone else state._world.allgather(mine.tolist(), "hvdrecover.metrics")
    return {"at": [state.epoch, state.batch], "rows": rows}


def of_rank(found: dict[str, Any] | None, state: TensorFlowState) -> Row | None:
    """This rank's part of what `of_all` gave, if it is of the same place and as many ranks."""
    if found is None or found["at"] != [state.epoch, state.batch]:
        return None
    rows: Row = found["rows"]
    return rows[state._world.rank()].copy() if len(rows) == state._world.size() else None


def assign(model: keras.Model, row: Row) -> bool:
    """Set metrics that have just been reset; False if some of them don't exist yet."""
    variables = model.metrics_variables
    values = _values(variables, row)
    for variable, value in zip(variables, values or (), strict=False):
        variable.assign(value)
    return values is not None


def add(model: keras.Model, row: Row) -> None:
    """Add to metrics what they had counted before they were reset."""
    variables = model.metrics_variables
    for variable, value in zip(variables, _values(variables, row) or (), strict=False):
        variable.assign_add(value)


def _values(variables: list[keras.Variable], row: Row) -> list[npt.NDArray[Any]] | None:
    """Return what variables were; None if these are others."""
    data, values, place = row.tobytes(), [], 0
    for variable in variables:
        like = variable.numpy()
        if place + like.nbytes > len(data):
            return None
        values.append(np.frombuffer(data, like.dtype, like.size, place).reshape(like.shape))
        place += like.nbytes
    return values if len(data) - place < 8 else None
