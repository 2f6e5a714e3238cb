from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hvdrecover.elastic.guard.distance import apart


def bytes_of(array: Any) -> Any:
    return np.array(array).reshape(-1).view(np.uint8)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (np.float16, "F16"),
        (np.float32, "F32"),
        (np.float64, "F64"),
        (np.int8, "I8"),
        (np.uint8, "U8"),
        (np.uint16, "U16"),
        (np.int32, "I32"),
        (np.int64, "I64"),
        (np.complex64, "C64"),
    ],
)
def test_how_many_numbers_differ_and_by_how_much(dtype: Any, code: str) -> None:
    mine, other = np.array([1, 2, 3, 4], dtype), np.array([1, 5, 3, 2], dtype)
    assert apart(bytes_of(mine), bytes_of(other), code) == (2, 3.0)
    assert apart(bytes_of(mine), bytes_of(mine), code) == (0, 0.0)


def test_numbers_that_numpy_lacks() -> None:
    mine, other = (torch.tensor([1.0, 2.0, value], dtype=torch.bfloat16) for value in (3.0, -1.0))
    code = [each.view(torch.uint8).numpy() for each in (mine, other)]
    assert apart(code[0], code[1], "BF16") == (1, 4.0)
    assert apart(bytes_of(np.uint8([1, 2])), bytes_of(np.uint8([1, 3])), "F8_E4M3") == (1, 2**-9)


def test_differences_that_are_no_numbers() -> None:
    mine, other = np.float32([0.0, 1.0]), np.float32([0.0, np.nan])
    count, by = apart(bytes_of(mine), bytes_of(other), "F32")
    assert count == 1 and math.isnan(by)
    assert apart(bytes_of(mine), bytes_of(np.float32([0.0, np.inf])), "F32") == (1, math.inf)


def test_a_zero_of_another_sign_is_another_number() -> None:
    assert apart(bytes_of(np.float32([0.0])), bytes_of(np.float32([-0.0])), "F32") == (1, 0.0)
