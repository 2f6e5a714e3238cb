"""Copies of many tensors, and trees that own their memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hvdrecover.checkpoint.arena import HUGE_PAGE
from hvdrecover.torch.copying import all_equal, copy_all, own

LARGE = HUGE_PAGE // 4 + 3  # float32 elements


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(0, 100, shape).to(dtype)


# Above 32 MB two threads share the work.
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("elements", [0, 1, 5_000_000])
def test_every_tensor_is_copied_however_many_and_large(count: int, elements: int) -> None:
    sources = [some(elements + number) for number in range(count)]
    targets = [torch.full_like(source, -1) for source in sources]
    copy_all(sources, targets)
    assert all(map(torch.equal, sources, targets))


def test_a_large_one_among_small_ones_is_copied() -> None:
    sources = [*(some(3) for _ in range(5)), some(20_000_000), *(some(3) for _ in range(5))]
    targets = [torch.full_like(source, -1) for source in sources]
    copy_all(sources, targets)
    assert all(map(torch.equal, sources, targets))


@pytest.mark.parametrize(
    "make",
    [
        lambda large: large.t(),
        lambda large: large[:, 1:],
        lambda large: large.to(torch.complex64).conj(),
        lambda large: large.to(torch.complex64).conj().imag,
        lambda large: large.to_sparse().to_dense(),
        lambda large: torch.nn.Parameter(large),
        lambda large: large.expand(2, *large.shape),
    ],
)
def test_large_tensors_that_do_not_lie_in_memory_as_they_are_come_out_equal(make: Any) -> None:
    source = make(some(2000, 700))
    target = torch.zeros(source.shape, dtype=source.dtype)
    copy_all([source], [target])
    assert torch.equal(target, source)
    scattered = torch.zeros(*source.shape[:-1], 2 * source.shape[-1], dtype=source.dtype)[..., ::2]
    copy_all([source], [scattered])
    assert torch.equal(scattered, source)


@pytest.mark.parametrize("make", [lambda x: x.conj(), lambda x: x.conj().imag])
def test_tensors_are_compared_by_the_numbers_that_they_show(make: Any) -> None:
    numbers = torch.randn(8, dtype=torch.complex64)
    shown = make(numbers)
    assert all_equal([(shown, shown.clone())])
    assert not all_equal([(shown, make(numbers + 1j))])


def test_nothing_is_copied_from_nothing() -> None:
    copy_all([], [])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, LARGE)])
def test_an_owned_tree_has_equal_tensors_in_memory_of_its_own(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = some(*shape, dtype=dtype)
    found = own({"it": [value]}, {})["it"][0]
    assert (found.dtype, found.shape, bits(found)) == (value.dtype, value.shape, bits(value))
    before = bits(value)
    found.zero_()
    assert bits(value) == before


def test_tensors_that_fit_are_filled_and_no_others() -> None:
    tree = {"state": {0: {"step": torch.tensor(3.0), "average": some(4)}}, "groups": [{"lr": 0.1}]}
    present: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(0.0), "average": torch.zeros(5)}},
        "groups": [{"lr": 0.2}],
    }
    found = own(tree, present)
    assert found["state"][0]["step"] is present["state"][0]["step"]
    assert found["state"][0]["average"] is not present["state"][0]["average"]
    assert found["state"][0]["average"].tolist() == tree["state"][0]["average"].tolist()
    assert present["state"][0]["average"].tolist() == [0.0] * 5
    assert found["groups"] == [{"lr": 0.1}]
    assert found["groups"][0] is not tree["groups"][0]


@pytest.mark.parametrize(
    "unfit",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(8)[::2],
        torch.zeros(2, 2),
        torch.nn.Parameter(torch.zeros(4)),
        None,
        0.0,
    ],
)
def test_a_tensor_is_not_copied_into_what_does_not_fit(unfit: Any) -> None:
    value = some(4)
    found = own([value], [unfit])[0]
    assert found is not unfit
    assert found is not value
    assert torch.equal(found, value)


def test_two_tensors_are_not_copied_into_one() -> None:
    shared = torch.zeros(3)
    one, other = some(3), some(3) + 100
    found = own([one, other], [shared, shared])
    assert torch.equal(found[0], one)
    assert torch.equal(found[1], other)


def test_tensors_of_another_memory_order_come_out_equal() -> None:
    value = some(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert torch.equal(own([value], [torch.zeros(2, 3, 4, 5)])[0], value)
    assert torch.equal(own([value], [None])[0], value)


def test_large_owned_tensors_survive_a_fork_and_outlive_the_tree() -> None:
    found = own([some(LARGE)], [None])[0]
    expected = bits(found)
    process = os.fork()
    if process == 0:
        os._exit(0 if bits(found) == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    view = found[1:]
    del found
    assert bits(view) == expected[4:]
