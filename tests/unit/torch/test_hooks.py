"""The hooks that watch over a module's calls are not in the way of the module."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.modules import module as of_all

import hvdrecover.torch as recover
from hvdrecover.torch.hooks import before_calls
from hvdrecover.torch.modules import Calls

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


class Copied(torch.nn.Linear):
    """Says by itself what is copied and stored of it: all."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_that_copies_all_of_itself_is_not_seen_in_its_copies(
    copied: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    seen: list[Any] = []
    module = Copied(2, 3)
    before_calls(module, lambda module, args, kwargs: seen.append(module))
    twin = copied(module)
    with torch.no_grad():
        module.weight.zero_()
    assert not torch.equal(twin(ONE), module(ONE))
    assert [called is module for called in seen] == [True]


COMPILED: dict[str, Callable[[torch.nn.Module], Callable[..., torch.Tensor]]] = {
    "itself": lambda module: torch.compile(module, backend="eager", fullgraph=True),
    "in place": lambda module: [module.compile(backend="eager", fullgraph=True), module][1],
    "in another": lambda module: torch.compile(torch.nn.Sequential(module), backend="eager", fullgraph=True),
    "in a function": lambda module: torch.compile(
        lambda given: module(given), backend="eager", fullgraph=True
    ),
}


@pytest.mark.parametrize("first", ["watched", "compiled"])
@pytest.mark.parametrize("way", COMPILED)
@pytest.mark.parametrize(
    "make", [lambda: torch.nn.Linear(2, 3), lambda: Doubling()], ids=["torch's", "one's own"]
)
def test_a_compiled_module_is_seen(make: Callable[[], torch.nn.Module], way: str, first: str) -> None:
    module = make()
    calls = Calls({"model": module}) if first == "watched" else None
    compiled = COMPILED[way](module)
    calls = calls or Calls({"model": module})
    for samples in (2, 3, 2, 4):
        given = torch.ones(samples, 2)
        assert torch.equal(compiled(given), module.forward(given))
        assert calls.first_bad() == ""
        compiled(given * torch.nan)
        assert calls.first_bad() == "the input of model"


class Doubling(torch.nn.Module):
    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 2 * given


def add_ten(*_: Any) -> tuple[torch.Tensor]:
    return (ONE * 10,)


def ten_more(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 10


@pytest.mark.parametrize(
    ("add", "output"),
    [
        (lambda module: module.register_forward_pre_hook(add_ten), 20.0),
        (lambda module: module.register_forward_pre_hook(add_ten, prepend=True), 20.0),
        (lambda module: module.register_forward_hook(ten_more), 12.0),
        (lambda module: of_all.register_module_forward_pre_hook(add_ten), 20.0),
        (lambda module: of_all.register_module_forward_hook(ten_more), 12.0),
    ],
    ids=["before", "before ours", "after", "before any module", "after any module"],
)
def test_hooks_of_others_are_called_as_well_until_they_are_removed(
    add: Callable[[torch.nn.Module], Any], output: float
) -> None:
    module, seen = Doubling(), []
    before_calls(module, lambda module, args, kwargs: seen.append(args))
    with add(module):
        assert module(ONE).tolist() == [[output, output]]
    assert module(ONE).tolist() == [[2.0, 2.0]]
    assert len(seen) == 2


@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_the_backward_pass_are_called_as_well(before: bool) -> None:
    module, seen, called = torch.nn.Linear(2, 3), [], []
    before_calls(module, lambda module, args, kwargs: seen.append(args))
    if before:
        module.register_full_backward_pre_hook(lambda *_: called.append("pre"))
    else:
        module.register_full_backward_hook(lambda *_: called.append("post"))
    module(ONE).sum().backward()
    assert (len(seen), len(called)) == (1, 1)


def test_a_hook_in_the_place_of_ours_is_called() -> None:
    module = Doubling()
    before_calls(module, lambda module, args, kwargs: pytest.fail("ours is gone"))
    module._forward_pre_hooks.clear()
    module.register_forward_pre_hook(add_ten)
    assert module(ONE).tolist() == [[20.0, 20.0]]


def test_a_watched_module_can_be_traced(watched: tuple[torch.nn.Module, list[Any]]) -> None:
    module, _ = watched
    twice = torch.nn.Sequential(module, torch.nn.Linear(3, 1))
    traced = torch.jit.trace(twice, ONE)
    assert torch.equal(traced(ONE), twice(ONE))


def test_a_model_under_a_guard_can_be_saved_as_a_whole() -> None:
    model = torch.nn.Linear(2, 3)
    recover.TorchState(model, guard=recover.Guard())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ONE), model(ONE))
