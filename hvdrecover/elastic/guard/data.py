"""Compare the version of the training data with the one in the commit that a job resumes from."""

from __future__ import annotations

from typing import Any

from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.data.version import differences
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.events import logger


def changes(guard: Guard | None, stored: Snapshot, where: str) -> list[str]:
    """Return a line for each change since a durable commit; none if either version is unknown."""
    if guard is None or guard.data is None or stored.dataset is None:
        return []
    if stored.dataset.get("version") == 1:
        logger.warning(
            "%s: an earlier hvdrecover saved a fingerprint of the training data, which cannot be compared "
            "with their version now; continuing without the comparison",
            where,
        )
        return []
    return differences(stored.dataset, guard.data)


def restart_epoch(state: dict[str, Any]) -> None:
    """Reset a commit's cursors to the start of their epochs, whatever the length of the data is now.

    Args:
        state: `Snapshot.state`, which is changed.
    """
    state["samplers"] = {
        name: {"epoch": cursor["epoch"], "processed_num": 0} for name, cursor in state["samplers"].items()
    }
