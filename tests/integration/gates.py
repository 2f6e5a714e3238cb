"""Runs that wait for the test, so that a fault that comes at its own pace still comes in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.jobs import DigitsRun, Job

GATED = Path(__file__).with_name("scripts") / "gated_digits.py"


class GatedRun(DigitsRun):
    """A run of the digits example that stops at gates.

    Args:
        folder: for all that belongs to it.
        epochs: how long to train.
        options: more options of the example.
        framework: whose example.
        gates: the commits after which no batch is finished until the test opens the gate; in order.
        sizes: epoch to the size of the world that has to be seen before that epoch's first commits are over.
    """

    def __init__(
        self,
        folder: Path,
        epochs: int,
        *options: str,
        framework: str = "torch",
        gates: Sequence[int] = (),
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(folder, epochs, *options, framework=framework, program=(str(GATED), framework))
        self.sizes = dict(sizes or {})
        self._closed = list(gates)
        self._environ = {"GATES": " ".join(map(str, gates)), "GATES_OPEN": str(folder / "open")}

    def start(self, launcher: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Job:
        """Start it, or start it again."""
        sizes = " ".join(f"{epoch}:{size}" for epoch, size in self.sizes.items())
        return super().start(launcher, {**self._environ, "SIZES": sizes, **(environ or {})})

    def open(self) -> None:
        """Open the first gate that is closed."""
        folder = self.folder / "open"
        folder.mkdir(exist_ok=True)
        (folder / str(self._closed.pop(0))).touch()
