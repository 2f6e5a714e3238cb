"""The record of one slot's training processes: how far they came, and how they died."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import deaths
from hvdrecover.launch.deaths import Cause, Death
from hvdrecover.launch.ends import End


@dataclass
class Record:
    """The record of one slot.

    Attributes:
        deaths: deaths in a row without progress, which is what goes beyond the farthest point reached before.
        farthest: the farthest point that is known of, as in `hvdrecover.heartbeat.Reading.point`.
        causes: the errors of the script that were seen, here or in an earlier start of the job.
        committed: whether the job has made any commit.
        joined: whether any training process of the job is known to have imported hvdrecover.
        trained: whether a training process of this slot, or of an earlier start, was in a training function.
        root: the checkpoint root in use, which the job has claimed; empty if there was none.
    """

    deaths: int = 0
    farthest: tuple[int, int] = (0, 0)
    causes: set[Cause] = field(default_factory=set)
    committed: bool = False
    joined: bool = False
    trained: bool = False
    root: str = ""
    _reached: tuple[int, int] = (0, 0)  # the farthest point at the last death

    def note(self, reading: Reading) -> None:
        """Note how far the training has come."""
        self.farthest = max(self.farthest, reading.point)
        self.committed = self.committed or reading.commit > 0
        before = (Phase.UNKNOWN, Phase.READY, Phase.STARTING)
        self.trained = self.trained or self.committed or reading.phase not in before
        self.joined = self.joined or self.committed or reading.phase != Phase.UNKNOWN

    def note_root(self, notes: dict[str, Any]) -> None:
        """Note which checkpoint root a training process has agreed on with the others."""
        self.root = str(notes.get("root", self.root))

    @property
    def handed_down(self) -> dict[str, str]:
        """Environment variables for the next training process."""
        untrained = {"HVDRECOVER_UNTRAINED": "1"} if self.deaths and not self.trained else {}
        return untrained | ({"HVDRECOVER_CLAIMED": self.root} if self.root and self.committed else {})

    def learn(self, known: dict[str, Any]) -> None:
        """Take over what the supervisor knows of the job."""
        self.committed = self.committed or bool(known["committed"])
        self.root = self.root or str(known["root"])
        self.causes |= {Cause.of(each) for each in known["causes"]}

    def died(self, death: Death, end: End) -> str:
        """Note a death that can be repaired in place; why it is not, or an empty string."""
        if self.farthest > self._reached:
            self.deaths = 0
        self.deaths, self._reached = self.deaths + 1, self.farthest
        reason = deaths.given_up(death, end, self.deaths, self.causes)
        if end.name == "script_error":
            self.causes.add(death.cause)
        return reason
