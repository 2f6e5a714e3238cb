from __future__ import annotations

import pytest

from hvdrecover.checkpoint.near.room import Room, largest, look, refusal

GB = 10**9


@pytest.mark.parametrize(
    ("room", "why"),
    [
        (Room(100 * GB, 60 * GB, 100 * GB), None),
        (Room(100 * GB, 29 * GB, 100 * GB), "don't fit into the 29 GB"),
        (Room(100 * GB, 60 * GB, 39 * GB), "too much for the 39 GB of memory"),
        (Room(100 * GB, 30 * GB, None), None),  # a disk, which may be filled
    ],
)
def test_three_commits_have_to_fit(room, why):
    told = refusal(room, 10 * GB)
    assert told is None if why is None else why in (told or "")


def test_a_quarter_of_a_tmpfs_stays_free():
    assert "less than 25 GB to data loaders" in (refusal(Room(100 * GB, 40 * GB, 100 * GB), 10 * GB) or "")
    assert refusal(Room(100 * GB, 40 * GB, 100 * GB), 10 * GB, held=15 * GB) is None


def test_a_small_tmpfs_is_left_to_data_loaders():
    container = Room(64 << 20, 64 << 20, 100 * GB)
    assert "less than 0.268 GB to data loaders" in (refusal(container, 10**6) or "")
    assert refusal(Room(512 << 20, 512 << 20, 100 * GB), 10**6) is None


@pytest.mark.parametrize("memory", [None, 30 * GB, 90 * GB])
@pytest.mark.parametrize("held", [0, 3 * GB])
def test_the_largest_that_fits_is_not_refused_and_more_is(memory, held):
    room = Room(100 * GB, 60 * GB, memory)
    assert refusal(room, largest(room, held), held) is None
    assert refusal(room, largest(room, held) + 1, held) is not None


def test_a_real_folder_has_room(tmp_path):
    room = look(tmp_path)
    assert 0 < room.free <= room.total
