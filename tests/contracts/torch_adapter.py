from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdrecover.torch.framework import TorchFramework
from tests.contracts.adapters import DTYPES, Adapter

_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in DTYPES.items()}


class TorchAdapter(Adapter):
    """torch."""

    def __init__(self) -> None:
        self.framework: TorchFramework = TorchFramework()
        self.dtypes = list(DTYPES)

    def model(self, seed: int = 0) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = (torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        return torch.nn.Sequential(*layers)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_one_step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 15).view(5, 3)).square().sum().backward()
        optimizer.step()

    def parameters(self, model: torch.nn.Module) -> Mapping[str, npt.NDArray[Any]]:
        return {name: value.detach().clone().numpy() for name, value in model.named_parameters()}

    def tensor(self, dtype: str, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
        if not content:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        return torch.frombuffer(bytearray(content), dtype=_DTYPES[dtype]).view(shape)

    def content(self, tensor: torch.Tensor) -> bytes:
        if tensor.numel() == 0:
            return b""
        flat = (
            tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg().view(-1)
        )
        data: bytes = flat.view(torch.uint8).numpy().tobytes()
        return data

    def not_contiguous(self) -> Mapping[str, torch.Tensor]:
        base = torch.arange(24.0).view(4, 6)
        numbers = torch.complex(base, base + 1)
        return {
            "transposed": base.T,
            "strided": base[::2, 1::3],
            "broadcast": base[0].expand(3, 6),
            "channels last": torch.arange(16.0)
            .view(1, 2, 2, 4)
            .contiguous(memory_format=torch.channels_last),
            "conjugated": numbers.conj(),
            "negated": numbers.conj().imag,
            "transposed and trained": base.clone().requires_grad_().T,
        }

    def unsupported(self) -> Mapping[str, torch.Tensor]:
        return {
            "sparse": torch.eye(2).to_sparse(),
            "without data": torch.ones(2, device="meta"),
            "of a dtype that safetensors lacks": torch.ones(2, dtype=torch.complex128),
        }

    def draw(self) -> Mapping[str, float]:
        return {"python": random.random(), "numpy": np.random.random(), "torch": torch.rand(()).item()}


made = TorchAdapter
