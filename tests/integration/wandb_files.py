"""The files of offline runs of W&B, which tells nobody what processes before this one have logged."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

# LevelDB's format of logs, after a head of its own: records in one or several pieces, none of which crosses a
# block's border. https://github.com/google/leveldb/blob/main/doc/log_format.md
_HEAD = b":W&B"
_BEGIN, _BLOCK, _PIECE = 7, 32768, 7
_WHOLE, _LAST = 1, 4


def last_step(folder: Path, run: str) -> int:
    """Return the last step of a run that is on disk, in the files of all processes; 0 if there is none."""
    from wandb.proto.wandb_internal_pb2 import Record

    steps = [0]
    for file in folder.glob(f"offline-run-*-{run}/run-{run}.wandb"):
        for record in map(Record.FromString, records(file.read_bytes())):
            if record.HasField("history"):
                steps.append(record.history.step.num)
    return max(steps)


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file, but for one that was cut off."""
    if not data.startswith(_HEAD):
        return
    place, pieces = _BEGIN, b""
    while place + _PIECE <= len(data):
        if (left := _BLOCK - place % _BLOCK) < _PIECE:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)  # after a checksum
        place += _PIECE + length
        pieces += data[place - length : place]
        if place <= len(data) and kind in (_WHOLE, _LAST):
            yield pieces
            pieces = b""
