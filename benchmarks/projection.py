"""The figures that a job of 1,000 ranks and 100 GB would see, computed from the laws of what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks import laws, report
from benchmarks.rows import Curve
from hvdrecover.launch.horovodrun import COLLECTIVE_SECONDS

_RANKS, _GIGABYTES = 1000.0, 100.0
_HEAD = ("1,000 ranks with 100 GB of state each", "computed", "made of")

At = Callable[[str, str, float], float]
"""Returns a chart's figure at a number."""


def projected(curves: Sequence[Curve]) -> list[str]:
    """Return the lines of the table; none if something that it needs was not measured."""
    known = {(curve.chart, curve.what): laws.of(curve) for curve in curves}
    try:
        rows = _rows(lambda chart, what, number: known[chart, what].at(number))
    except KeyError:
        return []
    return ["\n## Computed\n", *report.markdown([_HEAD, *rows])]


def _rows(at: At) -> list[tuple[str, str, str]]:
    copy = at("sizes", "a commit", _GIGABYTES)
    consult = at("ranks", "a commit", _RANKS)
    store = at("ranks", 'a commit, rng="store"', _RANKS) - consult
    durable = at("sizes", "until a commit is durable", _GIGABYTES)
    elect = at("ranks", "an election and agreement", _RANKS)
    sync = at("sizes", "sync of a new worker over loopback", _GIGABYTES)
    load = at("sizes", "restore, nothing cached", _GIGABYTES)
    end = at("guardians", "from a fault that ends the start to the orders to all", _RANKS)
    come = at("guardians", "until all guardians have come", _RANKS)
    standby = at("jobs", "SIGKILL of a worker to the next step of all", 2.0)
    start = at("jobs", "from the start to the first step of all", 2.0)
    rounds = math.log2(_RANKS)
    sent = f"a sync of {sync:.0f} s between two ranks, up to {rounds:.0f} times that by gloo's tree to all"
    return [
        (
            "a step",
            "not measured",
            "ranks send each other nothing of ours between commits; of a job of two, no cost "
            "[is visible](performance.md#recovery)",
        ),
        ("a commit", f"{copy:.1f} s", f"one copy; all ranks' numbers take {consult:.1f} ms of it"),
        (
            "more by gloo's ring",
            "not measured",
            f"those numbers go {_RANKS - 1:.0f} hops, one after another, beside the copy: as many times the "
            "latency between two hosts",
        ),
        ('more with rng="store"', f"{store:.1f} ms", "the streams of all ranks are kept as they came"),
        ("until a commit is durable", f"{durable:.0f} s", "beside training, to a disk as fast as this one"),
        (
            "SIGKILL of a process to the next step",
            f"{standby + sync:.0f} s",
            f"standby {standby:.1f} s, election {elect:.1f} ms; {sent}. Nothing is sent with the near tier",
        ),
        (
            "a host is lost",
            f"{start + sync:.0f} to {COLLECTIVE_SECONDS + start + sync:.0f} s",
            f"up to {COLLECTIVE_SECONDS} s until ranks give up a host that does not answer, by default (not "
            f"measured); processes on another one start in {start:.1f} s; {sent}",
        ),
        (
            "the whole job, from the checkpoint root",
            f"{(end + come) / 1e3 + start + load + sync:.0f} s",
            f"orders to all and their return {end + come:.0f} ms, start {start:.1f} s, restore {load:.0f} s; "
            f"{sent}",
        ),
    ]
