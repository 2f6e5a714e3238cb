"""Memory of commits that devices copy into by themselves."""

from __future__ import annotations

import gc

import pytest
import torch

from hvdrecover.checkpoint.arena import Arena, TensorSpec, allocate, plan
from hvdrecover.torch import framework
from tests.gpu.jobs import joined, pair, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing is pinned for a CPU")
LAYOUT = plan([TensorSpec("weight", "F32", (1 << 20,))])


def is_pinned(arena: Arena) -> bool:
    return torch.from_numpy(arena.buffer).is_pinned()


def arenas() -> list[Arena]:
    """All that there are in this process, of commits of other tests as well."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Arena]


def test_it_is_pinned_until_the_commit_is_let_go() -> None:
    memory = torch.from_numpy(allocate(LAYOUT.nbytes))
    arena = Arena(LAYOUT, memory.numpy())
    assert not memory.is_pinned()
    framework.pin(arena)
    assert memory.is_pinned()
    del arena
    gc.collect()
    assert not memory.is_pinned()


def test_a_refusal_disturbs_nobody(device: torch.device) -> None:
    arena = Arena(LAYOUT)
    framework.pin(arena)
    framework.pin(arena)  # CUDA refuses memory that is pinned already
    assert torch.ones(3, device=device).sum().item() == 3.0
    assert is_pinned(arena)


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_commits_are_pinned_if_they_are_of_tensors_on_a_device(where: str) -> None:
    torch.zeros((), device="cuda")  # CUDA is in use
    of_others = arenas()
    model, optimizer = pair(torch.device(where))
    state = joined(model=model, optimizer=optimizer)
    for _ in range(4):
        train(model, optimizer)
        state.commit()
    mine = [each for each in arenas() if all(each is not other for other in of_others)]
    assert mine
    assert {is_pinned(arena) for arena in mine} == {where == "cuda"}
