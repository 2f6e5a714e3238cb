"""Transfers in pieces, several at a time, in bounded memory."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from hvdrecover.checkpoint.arena import Bytes

T = TypeVar("T")


def transferred(
    buffer: Bytes, size: int, at_once: int, transfer: Callable[[Bytes, int], T]
) -> Iterator[tuple[Bytes, T]]:
    """Transfer a buffer in pieces; yield each piece, in order, when it is done.

    Args:
        buffer: the bytes.
        size: bytes of a piece; the last one may have fewer.
        at_once: the number of pieces that are under way, each in its own thread, while the caller has one.
        transfer: transfers one piece, given its offset in the buffer.

    Yields:
        A piece, and what ``transfer`` returned for it.

    Raises:
        Exception: the first error of ``transfer``, in order; by then, no piece is under way.
    """
    if 0 < len(buffer) <= size:  # most files; no thread is needed
        yield buffer, transfer(buffer, 0)
        return
    under_way: deque[tuple[Bytes, Future[T]]] = deque()
    try:
        for start in range(0, len(buffer), size):
            piece = buffer[start : start + size]
            under_way.append((piece, _in_thread(transfer, piece, start)))
            if len(under_way) > at_once:
                done, future = under_way.popleft()
                yield done, future.result()
        while under_way:
            done, future = under_way.popleft()
            yield done, future.result()
    finally:
        wait([future for _, future in under_way])


def _in_thread(transfer: Callable[[Bytes, int], T], piece: Bytes, start: int) -> Future[T]:
    # Not a ThreadPoolExecutor: at exit, Python waits for its threads, so a storage that hangs would keep a
    # finished process alive. Python does not wait for daemon threads.
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(transfer(piece, start))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="hvdrecover-transfer", daemon=True).start()
    return future
