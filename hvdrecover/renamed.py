"""Old names, which work in this version."""

from __future__ import annotations

import warnings


def warn(old: str, new: str, *, frames: int) -> None:
    """Say what something is called now.

    Args:
        old: the name by which it was called.
        new: the name to use.
        frames: how many functions of ours are between this one and who has called it so.
    """
    message = f"{old} is called {new} now; the next version drops the old name"
    warnings.warn(message, DeprecationWarning, stacklevel=2 + frames)
