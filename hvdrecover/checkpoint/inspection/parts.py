"""What a commit's state is made of; see `hvdrecover.elastic.contents`."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import CorruptCheckpointError


def attributes(state: Mapping[str, Json], url: str) -> dict[str, Json]:
    """The structure of each attribute but the samplers: containers, plain values, names of tensors.

    Args:
        state: `hvdrecover.checkpoint.manifest.Manifest.state`.
        url: what to call the commit in an error.

    Raises:
        CorruptCheckpointError: it is nonsense.
    """
    return _part(state, "attributes", url)


def samplers(state: Mapping[str, Json], url: str) -> dict[str, Json]:
    """The cursor of each sampler, by attribute name.

    Raises:
        CorruptCheckpointError: it is nonsense.
    """
    return _part(state, "samplers", url)


def _part(state: Mapping[str, Json], name: str, url: str) -> dict[str, Json]:
    part = state.get(name, {})
    if not isinstance(part, dict):
        raise CorruptCheckpointError(url, f"the {name} in its manifest are no JSON object")
    return part
