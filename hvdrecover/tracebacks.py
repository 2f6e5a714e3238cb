"""Errors that outlive their handling, without the memory of the functions that they came through."""

from __future__ import annotations

import traceback


def forget_locals(error: BaseException) -> None:
    """Clear the local variables of all functions that an error, its causes and its contexts came through.

    A traceback keeps them alive: tensors of a step that was interrupted, or the memory of a commit. Functions
    that still run are left alone.
    """
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            chain += [link.__cause__, link.__context__]
