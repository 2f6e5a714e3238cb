"""The readings that pages may give."""

from __future__ import annotations

from typing import Any

from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch.ends import Death


def reading(phase: Phase = Phase.TRAINING, **facts: Any) -> Reading:
    """A page of a process that trains."""
    return Reading(phase, **facts)


def death(returncode: int, phase: Phase = Phase.TRAINING, **facts: Any) -> Death:
    """The end of a process; facts of the page go there."""
    notes = {name: facts.pop(name) for name in ("error", "identity", "kinds") if name in facts}
    own = {name: facts.pop(name) for name in ("hung", "out_of_memory", "lost") if name in facts}
    return Death(returncode, reading(phase, **facts), notes, **own)
