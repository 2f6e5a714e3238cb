"""A checkpoint in one file, as most scripts write it: by ``torch.save``, under another name first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class File:
    """The newest checkpoint; a kill leaves the old one or the new one."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "checkpoint.pt"

    def save(self, tree: dict[str, Any]) -> None:
        """Replace what is there."""
        unfinished = self._path.with_suffix(".unfinished")
        torch.save(tree, unfinished)
        unfinished.replace(self._path)

    def load(self) -> dict[str, Any] | None:
        """Return what is there, if anything is."""
        return torch.load(self._path) if self._path.exists() else None
