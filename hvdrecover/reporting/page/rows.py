"""A time line in rows below each other, so that many faults are told apart."""

from __future__ import annotations

import math
from dataclasses import replace

from hvdrecover.reporting.page import axis
from hvdrecover.reporting.timeline import Stretch, Timeline

FAULTS = 6  # that a row has room for, on the average
_MOST = 12  # rows
_LANES = 48  # in all rows together


def rows(timeline: Timeline) -> list[Timeline]:
    """Cut a time line into parts of one round length; one with few faults, or many ranks, stays whole."""
    most = min(_MOST, _LANES // max(len(timeline.lanes), 1))
    count = min(math.ceil(len(timeline.faults) / FAULTS), most)
    if count < 2 or timeline.length <= 0.0:
        return [timeline]
    length = axis.rounded_up(timeline.length / count)
    return [_cut(timeline, place * length, length) for place in range(math.ceil(timeline.length / length))]


def _cut(timeline: Timeline, begin: float, length: float) -> Timeline:
    end = begin + length
    last = end >= timeline.length  # which has what happens at the very end, too

    def inside(time: float) -> bool:
        return begin <= time < end or (last and time >= end)

    def part(stretch: Stretch) -> Stretch:
        return replace(stretch, begin=max(stretch.begin, begin), end=min(stretch.end, end))

    return replace(
        timeline,
        length=length,
        lanes={
            rank: [part(each) for each in lane if each.begin < end and each.end > begin]
            for rank, lane in timeline.lanes.items()
        },
        faults=[each for each in timeline.faults if inside(each.time)],
        commits=[each for each in timeline.commits if inside(each.time)],
        starts=[each for each in timeline.starts if inside(each.time)],
        begin=begin,
    )
