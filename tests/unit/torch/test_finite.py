"""The code that tells numbers that are finite from others, compiled and by torch."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from hvdrecover.torch import guard

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BAD = [math.nan, math.inf, -math.inf]
SIZES = [1, 3, 64, 1000, 1 << 17]


def edges(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Numbers at the edges of what is finite, over and over."""
    limits = torch.finfo(dtype)
    some = torch.tensor(
        [limits.max, limits.min, limits.tiny, -limits.smallest_normal, 0.0, -0.0, 1.0], dtype=dtype
    )
    return some.repeat(size // len(some) + 1)[:size].clone()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_number_is_found_wherever_it_is(dtype: torch.dtype, size: int) -> None:
    tensor = edges(dtype, size)
    assert guard.look(tensor) is True
    for place in {0, size // 2, size - 1}:
        for value in BAD:
            bad = tensor.clone()
            bad[place] = value
            assert guard.look(bad) is False
            assert guard.look(tensor, bad, tensor) is False


def test_no_numbers_and_no_gradient_are_finite() -> None:
    assert guard.look() is True
    assert guard.look(torch.empty(0, 3), None) is True


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(3, 4)[:, :2],
        torch.zeros(1, 3).expand(2, 3),
        torch.eye(3).to_sparse(),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, dtype=torch.int64),
    ],
)
def test_of_what_is_not_dense_or_not_of_floats_the_compiled_look_tells_nothing(tensor: torch.Tensor) -> None:
    assert guard.look(tensor) is None
    assert guard.look(torch.ones(2), tensor) is None


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("shape", ["transposed", "sparse", "complex"])
def test_torch_looks_where_the_compiled_look_can_not(shape: str, value: float) -> None:
    def like(number: float) -> torch.Tensor:
        dense = torch.ones(3, 4)
        dense[1, 2] = number
        return {"transposed": dense.t(), "sparse": dense.to_sparse(), "complex": torch.complex(dense, dense)}[
            shape
        ]

    assert guard.are_finite([torch.ones(2), like(1.0)])
    assert not guard.are_finite([torch.ones(2), like(value)])
    assert guard.are_finite([torch.ones(2), like(1.0)])


def test_without_the_compiled_part_torch_looks() -> None:
    script = """
import math, sys
sys.modules["hvdrecover.torch._finite"] = None  # an ImportError
import torch
from hvdrecover.torch import guard
assert guard.look(torch.ones(3)) is None
assert guard.are_finite([torch.ones(3), torch.ones(2, dtype=torch.float16)])
assert not guard.are_finite([torch.ones(3), torch.tensor([1, math.inf])])
"""
    subprocess.run([sys.executable, "-c", script], check=True)
