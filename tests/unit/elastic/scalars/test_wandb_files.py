"""Files of W&B, in LevelDB's format of logs."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdrecover.elastic.scalars.wandb_files import last_step, records

BLOCK = 32768


def written(*records: bytes) -> bytes:
    """A file of records, as LevelDB writes it; its checksums are not looked at."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        left, begun = record, False
        while left or not begun:
            room = BLOCK - len(data) % BLOCK
            if room < 7:
                data += bytes(room)
                continue
            piece, left = left[: room - 7], left[room - 7 :]
            kind = (3 if left else 4) if begun else (2 if left else 1)
            data += struct.pack("<IHB", 0, len(piece), kind) + piece
            begun = True
    return bytes(data)


@pytest.mark.parametrize("size", [0, 10, BLOCK - 30, BLOCK - 15, BLOCK - 14, BLOCK - 13, 3 * BLOCK])
def test_records_of_any_size_are_read(size: int) -> None:
    expected = [b"first", b"x" * size, b"last"]
    assert list(records(written(*expected))) == expected


def test_a_record_that_was_cut_off_is_none() -> None:
    whole = written(b"first", b"y" * BLOCK)
    for end in (len(whole) - 1, BLOCK, 30, 20):
        assert list(records(whole[:end])) == [b"first"]
    assert list(records(whole[:7])) == []
    assert list(records(b"something else")) == []


def test_the_last_step_is_that_of_all_processes(tmp_path: Path) -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed; pip install '.[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    def history(step: int) -> bytes:
        record = Record()
        record.history.step.num = step
        return bytes(record.SerializeToString())

    assert last_step(tmp_path, "a") == 0
    for time, run, steps in [("1", "a", (1, 2)), ("2", "a", (3, 7)), ("3", "a", ()), ("4", "b", (9,))]:
        folder = tmp_path / f"offline-run-{time}-{run}"
        folder.mkdir()
        (folder / f"run-{run}.wandb").write_bytes(written(*map(history, steps), b""))
    assert last_step(tmp_path, "a") == 7
