"""The lines that witnesses may write in a run of two ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvdrecover.drill.witness import Line, Records


class Story:
    """Builds the records of a run; each call is a second later than the one before."""

    def __init__(self, size: int = 2) -> None:
        self.lines: list[Line] = []
        self._size = size
        self._now = 0.0
        self._at = (1, 0)
        self._pids = list(range(size))
        self._steps = 0

    def rendezvous(self, generation: int, commit: int, *restarted: int, size: int | None = None) -> Story:
        """The ranks agree on a commit; those that were restarted have new processes."""
        self._size = size or self._size
        self._at = (generation, commit)
        self._pids = [self._pids[rank] + 100 * (rank in restarted) for rank in range(self._size)]
        self._steps = 0
        return self._add("agreed")

    def step(self, samples: tuple[int, ...] = (), epoch: int = 0, at: int = 0) -> Story:
        """They step on a batch."""
        self._steps += 1
        self._add("step", number=self._steps)
        return self._add("batch", sampler="sampler", epoch=epoch, at=at, samples=samples)

    def commit(
        self,
        tensors: str = "",
        values: dict[str, Any] | None = None,
        own: Sequence[Mapping[str, Any]] = (),
        **facts: Any,
    ) -> Story:
        """They make the next commit; ``own`` has each rank's ``mean``, a buffer of the model, and values."""
        generation, commit = self._at
        facts = {"steps": self._steps, "batches": self._steps, "buffers": {"model": ["mean"]}, **facts}
        rows = []
        for rank in range(self._size):
            mine = dict(own[rank]) if own else {}
            mean = {"mean": str(mine.pop("mean"))} if "mean" in mine else {}
            model = {"weight": tensors or str(commit + 1), "bias": "0", **mean}
            rows.append({"tensors": {"model": model}, "values": {**(values or {}), **mine}})
        self._add("commit", by_rank=rows, made=commit + 1, **facts)
        self._at, self._steps = (generation, commit + 1), 0
        return self

    @property
    def records(self) -> Records:
        return Records(tuple(self.lines))

    def _add(self, what: str, by_rank: Sequence[Mapping[str, Any]] = (), **facts: Any) -> Story:
        self._now += 1.0
        for rank in range(self._size):
            own = {**facts, **by_rank[rank]} if by_rank else facts
            self.lines.append(
                Line(what, self._now + rank / 100, self._pids[rank], rank, self._size, *self._at, **own)
            )
        return self
