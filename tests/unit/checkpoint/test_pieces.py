import threading

import numpy as np
import pytest

from hvdrecover.checkpoint.storage.pieces import transferred


@pytest.mark.parametrize("nbytes", [0, 1, 9, 10, 11, 95, 100])
@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_pieces_come_in_order_with_what_was_returned_for_each(nbytes, at_once):
    buffer = np.arange(nbytes, dtype=np.uint8)
    found = list(transferred(buffer, 10, at_once, lambda piece, start: (start, piece.tolist())))
    assert [result for _, result in found] == [
        (start, list(range(start, min(start + 10, nbytes)))) for start in range(0, nbytes, 10)
    ]
    assert b"".join(piece.tobytes() for piece, _ in found) == buffer.tobytes()


def test_so_many_are_under_way_at_a_time_and_no_more():
    barrier, under_way, most = threading.Barrier(3), [], []

    def transfer(piece, start):
        under_way.append(start)
        barrier.wait(30)  # breaks unless three come here
        most.append(len(under_way))
        barrier.wait(30)
        under_way.remove(start)

    assert len(list(transferred(np.zeros(90, dtype=np.uint8), 10, 3, transfer))) == 9
    assert set(most) == {3}


def test_an_error_is_raised_when_nothing_is_under_way_any_more():
    started, ended = [], []
    release = threading.Event()

    def transfer(piece, start):
        started.append(start)
        if start == 10:
            release.set()
            raise OSError("the second piece")
        if start == 20:
            assert release.wait(30)
        ended.append(start)

    with pytest.raises(OSError, match="the second piece"):
        list(transferred(np.zeros(1000, dtype=np.uint8), 10, 2, transfer))
    assert {0, 10} <= set(started) < set(range(0, 100, 10))
    assert sorted([*ended, 10]) == sorted(started)
