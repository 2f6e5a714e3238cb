"""Near roots that are not left behind by jobs that are killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdrecover.checkpoint import near_tier

_PATIENCE, _LOOK = 10.0, 0.1  # seconds: a thread of a killed process may be unmapping gigabytes still


@contextmanager
def tidied(*roots: Path) -> Iterator[None]:
    """Delete the near roots of checkpoint roots, when the jobs within this have been killed."""
    try:
        yield
    finally:
        for root in roots:
            _remove(near_tier.folder("auto", near_tier.named(os.fspath(root))))


def _remove(near: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while near.is_dir() and not near_tier.remove(near) and time.monotonic() < deadline:
        time.sleep(_LOOK)
