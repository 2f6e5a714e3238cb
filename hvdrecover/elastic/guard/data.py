"""Training data that are not those of the commit that a job resumes from."""

from __future__ import annotations

from typing import Any

from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.data.fingerprint import Fingerprint, differences
from hvdrecover.elastic.guard.settings import Guard


def changes(guard: Guard | None, stored: Snapshot) -> list[str]:
    """Return a line for each change since a durable commit; none if nothing is known of one of the two."""
    if guard is None or guard.data is None or stored.dataset is None:
        return []
    return differences(Fingerprint.from_json(stored.dataset), guard.data)


def restart_epoch(state: dict[str, Any]) -> None:
    """Have a commit's cursors begin their epochs anew, whatever the data's length is now.

    Args:
        state: `Snapshot.state`, which is changed.
    """
    state["samplers"] = {
        name: {"epoch": cursor["epoch"], "processed_num": 0} for name, cursor in state["samplers"].items()
    }
