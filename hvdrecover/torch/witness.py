"""Torch's reports to the witness of a drill: what models are given, and when optimizers step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hvdrecover.checkpoint.digest import Digest
from hvdrecover.elastic.interfaces import StepObserver
from hvdrecover.torch.hooks import before_calls
from hvdrecover.torch.stepping import stepping


def watch(components: Mapping[str, Any], witness: StepObserver) -> None:
    """Have modules and optimizers tell.

    Args:
        components: by attribute name.
        witness: is told.
    """
    given = _Given(witness)
    for component in components.values():
        if isinstance(component, torch.nn.Module):
            before_calls(component, given.take)
        elif isinstance(component, torch.optim.Optimizer):
            stepping(component).begins.append(lambda: witness.step_begins(given.hex()))


class _Given:
    """The digest of what models were given for training since the last step, or the last rendezvous."""

    def __init__(self, witness: StepObserver) -> None:
        self._witness = witness
        self._agreements = 0
        self._digest: Digest | None = None

    def take(self, module: torch.nn.Module, arguments: Any, keywords: Any) -> None:
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._agreements != self._witness.agreements:  # a fault has ended a step that had not begun
            self._agreements, self._digest = self._witness.agreements, None
        self._digest = self._digest or Digest()
        for leaf in tree_leaves((arguments, keywords)):
            if isinstance(leaf, torch.Tensor) and not leaf.is_sparse:
                self._digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

    def hex(self) -> str | None:
        taken, self._digest = self._digest, None
        return taken.hex() if taken is not None else None
