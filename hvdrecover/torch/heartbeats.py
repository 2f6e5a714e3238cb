"""Heartbeats at each step of an optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdrecover import heartbeat
from hvdrecover.torch.stepping import stepping


def watch() -> None:
    """Count the steps of all optimizers of this process as progress, if a guardian watches it."""
    if heartbeat.watched():
        register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Any, arguments: Any, keywords: Any) -> None:
    if hasattr(optimizer, "synchronize"):  # by Horovod, which has this called twice
        steps = stepping(optimizer)
        if steps.counted == steps.count:
            return
        steps.counted = steps.count
    heartbeat.stepped()
