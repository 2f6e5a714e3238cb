"""The things that a replay compares and sends: gradients as bytes, and batches."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.torch.virtual.exchange import Entry, flat

_Gradients = list[torch.Tensor | None]


class TorchLeaves:
    """See `hvdrecover.elastic.virtual.replay.Leaves`.

    Args:
        parts: the entries of each optimizer, and their gradients.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[Entry], _Gradients]]) -> None:
        self._places = [
            (entry, gradients, place) for entries, gradients in parts for place, entry in enumerate(entries)
        ]

    def bytes_of(self, place: int) -> Bytes | None:
        """Return a gradient's bytes, in the order of its memory; None if there is none."""
        _, gradients, at = self._places[place]
        tensor = gradients[at]
        if tensor is None:
            return None
        found: Bytes = flat(tensor).view(torch.uint8).cpu().numpy()
        return found

    def put(self, place: int, data: Bytes | None) -> None:
        """Have other bytes in the place of a gradient's."""
        entry, gradients, at = self._places[place]
        if data is None:
            gradients[at] = None
            return
        tensor = torch.empty_like(entry.parameter, dtype=entry.wire, requires_grad=False)
        flat(tensor).copy_(torch.from_numpy(data).view(entry.wire))
        gradients[at] = tensor


def packed(value: Any) -> bytes:
    """Return what a part is computed from as bytes for processes of this very job."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return what `packed` was given."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    """Sends of a tensor's memory what is its own: a slice has all of the tensor that it was cut out of."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
            return NotImplemented
        whole = value.detach().clone().requires_grad_(value.requires_grad)
        return whole.__reduce_ex__(5)  # type: ignore[no-untyped-call]
