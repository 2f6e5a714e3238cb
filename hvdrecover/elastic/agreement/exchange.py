"""Exchanging values of any size among the ranks."""

from __future__ import annotations

import json
from typing import Any

from hvdrecover.elastic.interfaces import World


def gather_json(world: World, value: Any, name: str) -> list[Any]:
    """Return each rank's value, by rank.

    Args:
        world: the ranks, all of which call this.
        value: this rank's, of what JSON can hold.
        name: of the collective.
    """
    return [json.loads(text) for text in world.gather(json.dumps(value).encode(), name)]
