"""Transfers in pieces, several at a time, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.storage.threads import Threads

T = TypeVar("T")


def transferred(
    buffer: Bytes,
    size: int,
    at_once: int,
    transfer: Callable[[Bytes, int], T],
    prepare: Callable[[Bytes], None] = lambda piece: None,
) -> Iterator[tuple[Bytes, T]]:
    """Transfer a buffer in pieces; give each, in order, when it has been transferred.

    Args:
        buffer: what to transfer.
        size: bytes of a piece; the last one may have fewer.
        at_once: how many pieces are under way at a time, each in a thread of its own.
        transfer: transfers one piece, and is told where in the buffer it starts.
        prepare: given each piece before that, while earlier ones are under way.

    Yields:
        A piece, and what ``transfer`` returned for it.

    Raises:
        Exception: what ``transfer`` raised first, in order; nothing is under way any more then.
    """
    under_way: deque[tuple[Bytes, Future[T]]] = deque()
    with Threads(at_once, "hvdrecover-transfer") as threads:
        for start in range(0, len(buffer), size):
            piece = buffer[start : start + size]
            prepare(piece)
            under_way.append((piece, threads.submit(transfer, piece, start)))
            if len(under_way) > at_once:
                done, result = under_way.popleft()
                yield done, result.result()
        for done, result in under_way:
            yield done, result.result()
