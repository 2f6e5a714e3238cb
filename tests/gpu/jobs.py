"""States and jobs for the tests on a device."""

from __future__ import annotations

from typing import Any

import torch

import hvdrecover.torch as recover

URL = "fake://root"
WIDTH = 520  # so that a weight is larger than what is copied by torch's way for many small tensors


def network(device: torch.device, seed: int = 0) -> torch.nn.Sequential:
    """A network with running statistics and dropout; equal for equal seeds, on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(3, WIDTH),
            torch.nn.BatchNorm1d(WIDTH),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, 2),
        ).to(device)


def pair(
    device: torch.device, seed: int = 0, **options: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A network and its AdamW."""
    model = network(device, seed)
    return model, torch.optim.AdamW(model.parameters(), **options)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Steps on random numbers of the device's own generator."""
    device = next(model.parameters()).device
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, device=device)).square().sum().backward()
        optimizer.step()


def joined(checkpoint: recover.Checkpoint | str | None = None, **attributes: Any) -> recover.TorchState:
    """The state of a rank that is alone, after its rendezvous."""
    state = recover.TorchState(checkpoint=checkpoint, **attributes)
    state.sync()
    return state


def bits(tree: Any) -> Any:
    """A tree with each tensor as its device, dtype, shape and bytes."""
    if isinstance(tree, torch.Tensor):
        flat = tree.detach().contiguous().view(-1).cpu()
        held = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
        return tree.device.type, str(tree.dtype), tuple(tree.shape), held
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, list | tuple) else tree


def bits_of(*components: Any) -> Any:
    """The bits of all that components hold."""
    return [bits(component.state_dict()) for component in components]
