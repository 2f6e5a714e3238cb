"""The place that a training process has come to: its stacks, and the ranks that Horovod says it waits for."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdrecover.bounded import Bounded
from hvdrecover.config import Config
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import stacks, waits
from hvdrecover.launch.reports import Reports
from hvdrecover.launch.stalls import Stall
from hvdrecover.launch.training import Training

logger = logging.getLogger(__name__)


class Whereabouts:
    """A guardian's reports of where its training process is.

    Args:
        config: this process's settings.
        reports: of this guardian.
    """

    def __init__(self, config: Config, reports: Reports) -> None:
        self._config = config
        self._reports = reports
        self._disk = Bounded(waits.DISK)
        self._stall: tuple[int, int, list[int]] | None = None

    def report_stall(self, training: Training, reading: Reading) -> None:
        """Hand on, once for each commit, that Horovod says which tensors wait for which ranks."""
        missing = training.stalled()
        stall = (reading.generation, reading.commit, sorted(missing))
        if not missing or stall == self._stall:
            return
        self._stall = stall
        if self._reports.has_supervisor:  # which asks where these ranks are
            self._reports.send(kind="stalled", missing=missing, seconds=reading.silent)
        else:
            message = Stall(missing, reading.silent).message()
            self._reports.report("stalled", message, reading.rank, seconds=reading.silent, missing=missing)

    def report(self, training: Training, ranks: Sequence[int]) -> None:
        """Report to the supervisor where the training process is, if it is one of these ranks."""
        reading = training.read()
        if reading.rank not in ranks:
            return
        place = None
        if not reading.paused:
            text = stacks.take(training.pid, training.stacks)
            if text:
                self._save(text, training)
            at = stacks.summary(text)
            place = f"{self._reports.name(reading)}, which {f'is at {at}' if at else 'does not answer'}"
        self._reports.send(kind="where", rank=reading.rank, place=place)

    def show(self, training: Training) -> None:
        """Show where the training process is, to somebody who asks."""
        reading = training.read()
        if not self.take(training, reading):
            reason = "it is stopped, or has not imported hvdrecover yet"
            logger.warning("%s does not say where it is: %s", self._reports.name(reading), reason)

    def take(self, training: Training, reading: Reading) -> str:
        """Save the stacks of the training process.

        Returns:
            Where it is, in a few words; an empty string if it does not say.
        """
        if reading.phase == Phase.UNKNOWN:
            return ""
        text = stacks.take(training.pid, training.stacks)
        where = stacks.summary(text)
        if text:
            message = f"{self._reports.name(reading)} is at {where}"
            self._reports.report(
                "stacks", message, reading.rank, summary=where, file=self._save(text, training)
            )
        return f"at {where}" if where else ""

    def _save(self, text: str, training: Training) -> str | None:
        if self._config.events is None:
            sys.stderr.write(text)
            return None
        file = self._config.events / f"stacks-{self._config.host}-{training.pid}.txt"
        try:
            self._disk(_append, file, text)
        except OSError as error:
            logger.warning("stacks: %s", error)
            return None
        return os.fspath(file)


def _append(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as output:
        output.write(text)
