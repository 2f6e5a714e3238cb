"""The training states that are committed, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Shape:
    """A network of equal linear layers, trained by AdamW."""

    layers: int  # number of layers
    width: int  # features in and out of each

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters and the two moments of each."""
        return 3 * 4 * self.layers * (self.width * self.width + self.width)

    @property
    def tensors(self) -> int:
        """Number of tensors: for each parameter itself, its step and its moments."""
        return 4 * 2 * self.layers

    @property
    def title(self) -> str:
        """The name in tables."""
        size = f"{self.nbytes / 1e9:.1f} GB" if self.nbytes > 5e8 else f"{self.nbytes / 1e6:.2g} MB"
        return f"{size}, {self.tensors:,} tensors"


SHAPES = {
    "full": {"large": Shape(20, 2048), "many": Shape(250, 128)},
    "small": {"large": Shape(3, 512), "many": Shape(20, 16)},
}
STATES = ("large", "many")


@dataclass(frozen=True)
class Setting:
    """The way in which a topic is to be measured."""

    size: str  # `full`, or `small` for a test of the benchmarks themselves
    # `large` or `many`; for whole jobs the framework, `torch` or `tensorflow`, or what is trained, `digits`
    # say
    state: str
    folder: Path  # an empty folder on the disk to measure

    @property
    def shape(self) -> Shape:
        """The state's shape."""
        return SHAPES[self.size][self.state]

    def rounds(self, full: int) -> int:
        """Return how often to measure, if it is ``full`` times at full size."""
        return full if self.size == "full" else 2


class Training:
    """A model and its optimizer.

    Args:
        shape: of the network.
        trained: whether a step has been done, so that the optimizer has its state.
        device: where it lives.

    Attributes:
        nbytes: bytes of the whole state, without gradients.
        device: where it lives.
    """

    def __init__(self, shape: Shape, *, trained: bool, device: str = "cpu") -> None:
        self.nbytes = shape.nbytes
        self.device = torch.device(device)
        layers = [torch.nn.Linear(shape.width, shape.width, device="meta") for _ in range(shape.layers)]
        self.model = torch.nn.Sequential(*layers).to_empty(device=self.device)
        with torch.no_grad():  # as random as the measures need it, and a hundred times as fast
            for number, parameter in enumerate(self.model.parameters()):
                values = torch.linspace(-0.01, 0.01 + number / 1e6, parameter.numel())
                parameter.copy_(values.view_as(parameter))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if trained:
            self.step()

    def step(self) -> None:
        """Train on one sample; every parameter and all of the optimizer's state change."""
        self.model(torch.ones(1, self.model[0].in_features, device=self.device)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait until a device has done all that it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def nudge(self) -> None:
        """Change one parameter."""
        with torch.no_grad():
            next(self.model.parameters()).add_(1e-6)

    def tree(self) -> dict[str, object]:
        """The state as torch's own means save it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors under flat names, as safetensors saves them."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for key, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{key}.{name}": tensor for name, tensor in entries.items()}
        return found
