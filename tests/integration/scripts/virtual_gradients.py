"""Gradients of virtual ranks, dealt to the processes in several ways; rank 0 prints digests as JSON.

Each virtual rank's gradients are given, as those of a loss that is linear in the parameters.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
import horovod.torch as hvd
import torch

import hvdrecover.torch  # noqa: F401  (chooses Horovod's controller)
from hvdrecover.torch.virtual_gradients import Gradients
from hvdrecover.virtual import exchange

SHAPES = [(40, 33), (7,), (), (3, 5, 2), (1000,), (6, 1, 1), (129,)]
# Parameters, and the virtual ranks that lack them.
MISSING = {1: range(3), 2: range(8), 4: (2, 5), 5: (3,)}
CASES: dict[str, dict[str, Any]] = {
    "average": {},
    "a_sum_in_groups": {"op": hvd.Sum, "groups": 2},
    "fp16": {"compression": hvd.Compression.fp16},
    "two_passes": {"backward_passes_per_step": 2},
    "bfloat16_and_float64": {},
}
NBYTES = 1024  # of buckets: there are several


def layouts(size: int, processes: int) -> Iterator[list[int]]:
    """Equal shares, all at one process, and uneven ones with spares in between."""
    if processes == 1:
        yield [size]
        return
    spares = [0] * (processes - 2)
    yield [size // processes + (rank < size % processes) for rank in range(processes)]
    yield [4, *spares, size - 4]
    yield [0, *spares, size]
    yield [*spares, 3, size - 3]
    yield [1] * (processes - 1) + [size - processes + 1]


def leaf(virtual_rank: int, place: int, number: int, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient, of elements of very different size."""
    if place == 5:
        return torch.full_like(parameter, -0.0, requires_grad=False)  # a sum with a single 0.0 is 0.0
    random = torch.Generator().manual_seed(100 * virtual_rank + 10 * place + number)
    values = torch.randn(parameter.shape, generator=random)
    exponents = torch.randint(-4, 4, parameter.shape, generator=random)
    return (values * 10.0**exponents).to(parameter.dtype)


def step(case: str, sums: Gradients, parameters: list[torch.Tensor], shares: list[int]) -> None:
    sums.begin(shares, hvd.rank())
    first = list(accumulate(shares, initial=0))[hvd.rank()]
    for virtual_rank in range(first, first + shares[hvd.rank()]):
        sums.part_begins(virtual_rank)
        for number in range(CASES[case].get("backward_passes_per_step", 1)):
            present = [
                (place, each)
                for place, each in enumerate(parameters)
                if virtual_rank not in MISSING.get(place, ())
            ]
            loss = sum(
                (each * leaf(virtual_rank, place, number, each)).sum().float() for place, each in present
            )
            loss.backward()
        sums.part_ends()
    sums.finish()


def digests(case: str, size: int) -> list[str]:
    """One for each way to deal the virtual ranks."""
    mixed = case == "bfloat16_and_float64"
    dtypes = [torch.bfloat16, torch.float64, torch.float32] if mixed else [torch.float32]
    parameters = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[place % len(dtypes)]))
        for place, shape in enumerate(SHAPES)
    ]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters), **CASES[case])
    with mock.patch.object(exchange, "BUCKET", NBYTES):
        sums = Gradients(f"{case}.{size}", optimizer, size)
    found = []
    for shares in layouts(size, hvd.size()):
        step(case, sums, parameters, shares)
        averages = [each.grad.contiguous().view(-1).view(torch.uint8) for each in parameters]
        found.append(hashlib.sha256(b"".join(each.numpy().tobytes() for each in averages)).hexdigest())
        optimizer.step()  # Horovod's own `synchronize` would send them once more
        assert all(
            torch.equal(each.grad.view(-1).view(torch.uint8), average)
            for each, average in zip(parameters, averages, strict=True)
        )
    return found


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    found = {f"{case} {size}": digests(case, size) for case in CASES for size in (7, 8)}
    everywhere = hvd.allgather_object(found)
    if hvd.rank() == 0:
        print(json.dumps({"digests": everywhere}), flush=True)


if __name__ == "__main__":
    main()
