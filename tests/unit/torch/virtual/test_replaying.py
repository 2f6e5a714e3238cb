"""The things that a replay sends, and the way it compares gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hvdrecover.torch.virtual.exchange import Entry
from hvdrecover.torch.virtual.replaying import TorchLeaves, packed, unpacked


@dataclass
class Batch:
    """A class of a script's own."""

    inputs: torch.Tensor
    texts: list[str]


def test_batches_arrive_as_they_were() -> None:
    inputs = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    arrived = unpacked(packed(Batch(inputs, ["a", "b"])))
    assert torch.equal(arrived.inputs, inputs)
    assert arrived.inputs.stride() == inputs.stride()
    assert arrived.texts == ["a", "b"]


def test_a_slice_is_sent_without_what_it_was_cut_out_of() -> None:
    whole = torch.arange(1 << 20, dtype=torch.float32)
    data = packed({"inputs": whole[100:108]})
    assert len(data) < 5_000
    assert unpacked(data)["inputs"].tolist() == list(range(100, 108))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_bytes_of_gradients_are_looked_at_and_replaced(dtype: torch.dtype) -> None:
    parameter = torch.zeros(3, 5, dtype=dtype).t()
    gradients: list[torch.Tensor | None] = [None, torch.randn(3, 5).to(dtype).t()]
    leaves = TorchLeaves([([Entry("x", parameter, dtype, 1), Entry("y", parameter, dtype, 1)], gradients)])
    assert leaves.bytes_of(0) is None
    data = leaves.bytes_of(1)
    assert data is not None
    assert (data.dtype, data.shape) == (np.uint8, (15 * dtype.itemsize,))
    leaves.put(0, data)
    leaves.put(1, None)
    healed, gone = gradients
    assert gone is None
    assert healed is not None
    assert healed.stride() == parameter.stride()
    again = leaves.bytes_of(0)
    assert again is not None
    assert (again == data).all()
