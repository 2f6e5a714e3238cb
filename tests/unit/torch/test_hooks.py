"""What watches over a module's calls is not in the way of the module."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.torch.hooks import before_calls

ONE = torch.ones(1, 2)
WITHOUT_US = """
import sys, pickle
import torch
sys.modules["hvdrecover"] = None  # as if it were not installed
module = pickle.loads(sys.stdin.buffer.read())
assert module(torch.ones(1, 2)).shape == (1, 3)
module.register_forward_pre_hook(lambda module, args: print("called"))
module(torch.ones(1, 2))
"""


@pytest.fixture
def watched() -> tuple[torch.nn.Module, list[Any]]:
    """A module, and what it has been called with."""
    seen: list[Any] = []
    module = torch.nn.Linear(2, 3)
    before_calls(module, lambda module, args, kwargs: seen.append((module, args, kwargs)))
    return module, seen


def test_calls_are_seen_with_all_arguments(watched: tuple[torch.nn.Module, list[Any]]) -> None:
    module, seen = watched
    module(ONE)
    module(input=ONE)
    assert [(called is module, len(args), list(kwargs)) for called, args, kwargs in seen] == [
        (True, 1, []),
        (True, 0, ["input"]),
    ]


def test_calls_of_a_copy_are_not_seen(watched: tuple[torch.nn.Module, list[Any]]) -> None:
    module, seen = watched
    twin = copy.deepcopy(module)
    assert torch.equal(twin(ONE), module(ONE))
    assert [called is module for called, _, _ in seen] == [True]


def test_a_stored_module_needs_no_hvdrecover(watched: tuple[torch.nn.Module, list[Any]]) -> None:
    module, _ = watched
    again = pickle.dumps(pickle.loads(pickle.dumps(module)))
    ran = subprocess.run([sys.executable, "-c", WITHOUT_US], input=again, capture_output=True, check=False)
    assert (ran.stdout.decode(), ran.stderr.decode(), ran.returncode) == ("called\n", "", 0)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_module_is_seen(in_place: bool, watched: tuple[torch.nn.Module, list[Any]]) -> None:
    module, seen = watched
    if in_place:
        module.compile(backend="eager")
        whole = module
    else:
        whole = torch.compile(module, backend="eager")
    for _ in range(2):
        assert torch.equal(whole(ONE), module.forward(ONE))
    assert len(seen) == 2


def test_a_model_under_a_guard_can_be_saved_as_a_whole() -> None:
    model = torch.nn.Linear(2, 3)
    recover.TorchState(model, guard=recover.Guard())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ONE), model(ONE))
