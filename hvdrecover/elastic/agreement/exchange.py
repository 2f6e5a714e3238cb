"""Exchanging values of any size among the ranks."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hvdrecover.elastic.interfaces import World


def gather_json(world: World, value: Any, name: str) -> list[Any]:
    """Return each rank's value, by rank.

    Args:
        world: the ranks, all of which call this.
        value: this rank's, of what JSON can hold.
        name: of the collective.
    """
    text = json.dumps(value).encode()
    lengths = world.allgather([len(text)], f"{name}.length")[:, 0]
    padded = text.ljust(-(-int(lengths.max()) // 8) * 8)
    table = world.allgather(np.frombuffer(padded, dtype=np.int64).tolist(), name)
    return [json.loads(row.tobytes()[:length]) for row, length in zip(table, lengths, strict=True)]
