"""Copying trees once, for tests of what comes of it."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.values import Json
from hvdrecover.state.adapter import Framework, Tree
from hvdrecover.state.trees import Copier


def capture(
    framework: Framework, trees: Mapping[str, Tree], reuse: Mapping[str, Arena]
) -> tuple[dict[str, Json], dict[str, Arena]]:
    """Each tree's structure as JSON, and an arena for each tree that holds tensors, by attribute name."""
    copier = Copier(framework)
    parts = copier.take_apart(trees)
    return {name: part.structure for name, part in parts.items()}, copier.copy(parts, reuse)
