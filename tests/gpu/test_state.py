"""Commits of tensors that live on a device: copied out, put back, and resumed from, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import NumericsError
from tests.gpu.jobs import URL, bits, bits_of, joined, pair, train

needs_streams = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no streams")
_BUSY = 200  # products of matrices, which keep a device busy for longer than it takes to ask for them


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_model_and_optimizer_go_back_and_on_alike(device: torch.device, options: dict[str, Any]) -> None:
    model, optimizer = pair(device, **options)
    state = joined(model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    state.commit()
    expected = bits_of(model, optimizer)
    train(model, optimizer, 3)
    after = bits_of(model, optimizer)
    assert after != expected
    state.restore()
    assert bits_of(model, optimizer) == expected
    train(model, optimizer, 3)
    assert bits_of(model, optimizer) == after


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_new_process_resumes_on_the_device(
    device: torch.device, options: dict[str, Any], roots: Any
) -> None:
    model, optimizer = pair(device, **options)
    state = joined(URL, model=model, optimizer=optimizer)
    train(model, optimizer, 2)
    state.commit(durable=True)
    state.flush()
    expected = bits_of(model, optimizer)
    train(model, optimizer)
    after = bits_of(model, optimizer)
    again = pair(device, seed=1, **options)
    joined(URL, model=again[0], optimizer=again[1])
    assert bits_of(*again) == expected
    train(*again)
    assert bits_of(*again) == after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (1200, 1100)])
def test_tensors_of_any_kind_go_back(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    module = torch.nn.Module()
    module.register_buffer("whole", torch.randint(0, 2, shape).to(device, dtype))
    module.register_buffer("turned", torch.randint(0, 2, (7, 9)).to(device, dtype).t())
    state = joined(model=module)
    state.commit()
    expected = bits_of(module)
    for buffer in module.buffers():
        buffer.copy_(~buffer.bool())
    state.restore()
    assert bits_of(module) == expected


def test_plain_tensors_come_back_on_their_device(device: torch.device) -> None:
    state = joined(best={"loss": torch.arange(3.0, device=device)}, of=[1])
    state.commit()
    expected = bits(state.best)
    state.best["loss"] += 1
    state.restore()
    assert bits(state.best) == expected


def test_each_step_of_what_is_drawn_on_the_device_is_repeated(device: torch.device) -> None:
    for rng in ("reseed", "store"):
        state = joined(step=0, rng=rng)
        state.step = 1
        state.commit()
        first = bits(torch.rand(5, device=device))
        state.restore()
        assert bits(torch.rand(5, device=device)) == first, rng


def test_numbers_that_are_not_finite_are_seen_on_the_device(device: torch.device) -> None:
    model, optimizer = pair(device)
    state = joined(model=model, optimizer=optimizer, guard=recover.Guard(parameters_every_commits=1))
    train(model, optimizer)
    state.commit()
    with torch.no_grad():
        model[3].weight[5, 7] = float("nan")
    with pytest.raises(NumericsError, match=r"parameter model\.3\.weight"):
        state.commit()
    assert state.last_commit.commit == 1


def test_a_commit_at_which_nothing_has_changed_is_recognised(device: torch.device) -> None:
    model, optimizer = pair(device)
    state = joined(model=model, optimizer=optimizer)
    train(model, optimizer)
    state.commit()
    first = bits(torch.rand(5, device=device))
    state.commit()
    assert bits(torch.rand(5, device=device)) == first


def test_commits_take_no_memory_of_the_device(device: torch.device) -> None:
    model, optimizer = pair(device)
    state = joined(model=model, optimizer=optimizer)
    held = []
    for _ in range(4):
        train(model, optimizer)
        optimizer.zero_grad()
        state.commit()
        held.append(torch.cuda.memory_allocated() if device.type == "cuda" else 0)
    assert len(set(held)) == 1


def _busy(device: torch.device) -> torch.Tensor:
    """A one that the device has not computed yet when this returns."""
    square = torch.ones(2048, 2048, device=device)
    for _ in range(_BUSY):
        square = square @ square / 2048
    return square[0, 0]


@needs_streams
def test_a_commit_holds_what_was_asked_for_before_it_and_nothing_after(device: torch.device) -> None:
    module = torch.nn.Linear(1200, 1200, device=device)
    state = joined(model=module)
    expected = bits(module.weight + 1)
    with torch.no_grad():
        module.weight += _busy(device)
    state.commit()
    with torch.no_grad():
        module.weight.zero_()
    state.restore()
    assert bits(module.weight) == expected


@needs_streams
def test_a_commit_on_a_stream_of_ones_own_holds_what_that_has_computed(device: torch.device) -> None:
    module = torch.nn.Linear(1200, 1200, device=device)
    state = joined(model=module)
    expected = bits(module.weight + 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.no_grad():
            module.weight += _busy(device)
        state.commit()
        with torch.no_grad():
            module.weight.zero_()
        state.restore()
    torch.cuda.synchronize()
    assert bits(module.weight) == expected
