"""The exchange of any number of partial sums, in the order of the tree.

All entries one after the other are cut into segments, and each of these into a share for each process. By
``alltoall`` a process gets its share of all partial sums; it adds them up, and by ``allgather`` all get the
result. With one subtree for each process, as many bytes are sent as by a ring allreduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import horovod.torch as hvd
import torch

from hvdrecover.elastic.virtual.tree import Node, RunningSum
from hvdrecover.torch.virtual.exchange import NOTHING, Entry, Handle, flat, forget

# Bytes; of 4, 8, 16 and 32 MiB the fastest with three processes, and as fast as 8 with four.
SEGMENT = 16 << 20
_ALIGNMENT = 64  # bytes, as torch aligns memory of its own
_SENT_AS_THEY_ARE = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Part:
    """Elements of an entry that are in a segment.

    Attributes:
        place: the number of the entry.
        start: the first of the elements, as they are in memory.
        stop: one more than the last.
        offset: where they begin in the segment.
    """

    place: int
    start: int
    stop: int
    offset: int


@dataclass
class Segment:
    """A piece of the gradients, sent at once.

    Attributes:
        number: of the segment.
        parts: what it is made of; of one dtype, on one device.
        length: its elements.
    """

    number: int
    parts: list[Part] = field(default_factory=list)
    length: int = 0


def cut(entries: Sequence[Entry], nbytes: int = SEGMENT) -> list[Segment]:
    """Return the segments of some entries; entries come in reverse, as gradients do.

    Args:
        entries: what is summed.
        nbytes: the most that a segment holds.
    """
    segments: list[Segment] = []
    last: dict[tuple[torch.dtype, torch.device], Segment] = {}
    for place in reversed(range(len(entries))):
        entry = entries[place]
        kind = entry.wire, entry.parameter.device
        most, step = nbytes // entry.wire.itemsize, _ALIGNMENT // entry.wire.itemsize
        count = entry.parameter.numel()
        for start in range(0, count, most):
            stop = min(start + most, count)
            segment = last.get(kind)
            if segment is None or segment.length + stop - start > most:
                segment = last[kind] = Segment(len(segments))
                segments.append(segment)
            segment.parts.append(Part(place, start, stop, segment.length))
            segment.length += -(-(stop - start) // step) * step
    return segments


class Buffers:
    """Memory for segments, kept from step to step: new pages cost as much as sending."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int | str, ...], torch.Tensor] = {}

    def take(self, key: tuple[int | str, ...], count: int, like: torch.Tensor) -> torch.Tensor:
        """Return some elements, whatever is in them.

        Args:
            key: says what they are for; those of the step before are given up.
            count: how many.
            like: has their dtype and device.
        """
        found = self._kept.get(key)
        if found is None or found.dtype != like.dtype or found.numel() != count:
            found = self._kept[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return found

    def forget(self) -> None:
        """Give up all, as Horovod may still write into some."""
        self._kept.clear()


class Segments:
    """See `Exchange`.

    Args:
        entries: what is summed.
        segments: of the entries.
        pieces: the subtrees of each process.
        rank: this process.
        prefix: of the names of collectives.
        buffers: kept between steps; parameters' gradients are in them until the next.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        segments: Sequence[Segment],
        pieces: Sequence[Sequence[Node]],
        rank: int,
        prefix: str,
        buffers: Buffers,
    ) -> None:
        self._entries = entries
        self._segments = segments
        self._pieces = pieces
        self._rank = rank
        self._prefix = prefix
        self._buffers = buffers
        self._rounds = max(map(len, pieces))
        mine = len(pieces[rank])
        # By round and entry, and how many of these a segment still waits for.
        self._values: list[dict[int, torch.Tensor | None]] = [{} for _ in range(mine)]
        self._lacking = [[len({part.place for part in each.parts}) for each in segments] for _ in range(mine)]
        self._of: dict[int, list[Segment]] = {}
        for segment in segments:
            for place in {part.place for part in segment.parts}:
                self._of.setdefault(place, []).append(segment)
        self._scattering: list[list[Handle | None]] = [[None] * self._rounds for _ in segments]
        self._scattered = 0  # in order, so far as they are asked for
        self._gathering: deque[tuple[Segment, Handle]] = deque()
        for number in range(mine, self._rounds):
            for segment in segments:
                self._scatter(segment, number, None)

    def give(self, piece: int, place: int, value: torch.Tensor | None) -> None:
        """See `Exchange`."""
        self._values[piece][place] = value
        for segment in self._of.get(place, ()):
            self._lacking[piece][segment.number] -= 1
            if not self._lacking[piece][segment.number]:
                self._scatter(segment, piece, self._packed(segment, piece))
                self._advance(wait=False)
                for part in segment.parts:
                    if len(self._of[part.place]) == 1:
                        del self._values[piece][part.place]

    def finish(self) -> None:
        """See `Exchange`."""
        self._advance(wait=True)
        whole: dict[int, torch.Tensor] = {}
        while self._gathering:
            segment, handle = self._gathering.popleft()
            total = self._received(segment, hvd.synchronize(handle))
            for part in segment.parts:
                self._unpack(part, total, whole)
        for place, value in whole.items():
            self._entries[place].deliver(value, divided=self._entries[place].is_wide)
        for entry in self._entries:
            if not entry.parameter.numel():
                entry.deliver(entry.nothing())

    def abandon(self) -> None:
        """See `Exchange`."""
        forget(handle for handles in self._scattering for handle in handles)
        forget(handle for _, handle in self._gathering)
        self._gathering.clear()
        self._buffers.forget()

    def _packed(self, segment: Segment, number: int) -> torch.Tensor:
        """A segment of this process's own partial sums."""
        values = self._values[number]
        if len(segment.parts) == 1:  # nothing to bring together
            part = segment.parts[0]
            value = values[part.place]
            if value is not None and part.stop - part.start == segment.length:
                return flat(value)[part.start : part.stop]
        packed = self._buffers.take(("packed", segment.number, number), segment.length, self._like(segment))
        for part in segment.parts:
            value = values[part.place]
            there = packed[part.offset : part.offset + part.stop - part.start]
            there.fill_(NOTHING) if value is None else there.copy_(flat(value)[part.start : part.stop])
        return packed

    def _scatter(self, segment: Segment, number: int, packed: torch.Tensor | None) -> None:
        """Send a partial sum, or none; every process has to take part in every round."""
        counts, like = self._counts(segment), self._like(segment)
        senders = sum(len(nodes) > number for nodes in self._pieces)
        received = self._buffers.take(
            ("received", segment.number, number), senders * counts[self._rank], like
        )
        if packed is None:
            packed, counts = like, [0] * len(counts)
        sent, factor = _as_sent(packed)
        splits = torch.tensor([factor * each for each in counts], dtype=torch.int32)
        self._scattering[segment.number][number] = hvd.mpi_ops._alltoall_async(
            sent,
            splits,
            _as_sent(received)[0],
            splits.new_empty(len(counts)),
            f"{self._prefix}.scatter.{segment.number}.{number}",
            hvd.global_process_set,
        )

    def _advance(self, *, wait: bool) -> None:
        """Add up the segments that have come, and send the sums."""
        while self._scattered < len(self._segments):
            handles = self._scattering[self._scattered]
            if not wait and not all(each is not None and hvd.poll(each) for each in handles):
                return
            segment = self._segments[self._scattered]
            total = self._total(segment, [hvd.synchronize(each)[0] for each in handles])
            self._scattered += 1
            gathered = self._buffers.take(("gathered", segment.number), segment.length, total)
            handle = hvd.mpi_ops._allgather_async(
                _as_sent(total)[0],
                _as_sent(gathered)[0],
                f"{self._prefix}.gather.{segment.number}",
                hvd.global_process_set,
            )
            self._gathering.append((segment, handle))

    def _total(self, segment: Segment, received: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of all partial sums of this process's part of a segment."""
        count = self._counts(segment)[self._rank]
        if not count:
            return self._received(segment, received[0])
        rounds = [iter(self._received(segment, each).view(-1, count)) for each in received]
        running = RunningSum[torch.Tensor](sum(len(node) for each in self._pieces for node in each), add)
        for nodes in self._pieces:
            for node, rows in zip(nodes, rounds, strict=False):
                running.push(node, next(rows))
        entry = self._entries[segment.parts[0].place]
        return running.values[0].div_(entry.divisor) if entry.is_wide else running.values[0]

    def _unpack(self, part: Part, total: torch.Tensor, whole: dict[int, torch.Tensor]) -> None:
        entry = self._entries[part.place]
        piece = total[part.offset : part.offset + part.stop - part.start]
        if part.stop - part.start == entry.parameter.numel():
            like = torch.empty_like(entry.parameter, device="meta")
            whole[part.place] = piece.as_strided(like.shape, like.stride())
        else:
            value = whole.get(part.place)
            if value is None:
                value = whole[part.place] = torch.empty_like(
                    entry.parameter, dtype=entry.wire, requires_grad=False
                )
            flat(value)[part.start : part.stop].copy_(piece)

    def _received(self, segment: Segment, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self._entries[segment.parts[0].place].wire)

    def _like(self, segment: Segment) -> torch.Tensor:
        """No elements of a segment."""
        entry = self._entries[segment.parts[0].place]
        return torch.empty(0, dtype=entry.wire, device=entry.parameter.device)

    def _counts(self, segment: Segment) -> list[int]:
        """Return the number of elements of a segment that each process adds up."""
        processes = len(self._pieces)
        share = -(-segment.length // processes)
        return [max(0, min(share, segment.length - share * each)) for each in range(processes)]


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the sum of two partial sums, in the place of the left one."""
    return left.add_(right)


def _as_sent(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor as Horovod can send it, and the elements of that for each of its own."""
    if tensor.dtype in _SENT_AS_THEY_ARE:
        return tensor, 1
    return tensor.view(torch.uint8), tensor.dtype.itemsize
