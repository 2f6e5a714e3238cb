"""A slot's standby: started when training is calm, replaced when it is of no use, woken when it is needed."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import standby
from hvdrecover.launch.python_command import PythonCommand
from hvdrecover.launch.training import Training

logger = logging.getLogger(__name__)

CALM = 1.0  # seconds of training before a standby is started, so that it never competes with a recovery
STUCK = 600.0  # seconds after which a standby that is still not ready is replaced


class Readiness:
    """Keeps the standby of one slot.

    Args:
        command: what a standby is to run; None keeps none.
        environ: the environment of the training process.
    """

    def __init__(self, command: PythonCommand | None, environ: Mapping[str, str]) -> None:
        self._command = command
        self._environ = environ
        self._standby: Training | None = None
        self._calm_since: float | None = None
        self._reported = False

    @property
    def is_warm(self) -> bool:
        """Return whether there is a standby that has imported everything, and waits."""
        standby = self._standby
        return standby is not None and standby.returncode is None and standby.read().phase == Phase.READY

    def news(self) -> bool | None:
        """Return whether there is a standby that has imported all and waits; None if that is known."""
        ready = self.is_warm
        if ready == self._reported:
            return None
        self._reported = ready
        return ready

    def keep(self, training: Training, reading: Reading, now: float) -> None:
        """Start a standby when training has been calm for a while, and replace one that is of no use.

        Args:
            training: the training process.
            reading: what its page says.
            now: the time, in seconds.
        """
        calm = reading.phase == Phase.TRAINING and reading.commits > 0
        self._calm_since = (self._calm_since or now) if calm else None
        if self._standby is not None and (
            self._standby.returncode is not None or _is_stuck(self._standby.read())
        ):
            self.drop()
            self._calm_since = now
        if self._command is None or self._standby is not None or self._calm_since is None:
            return
        modules = training.notes().get("modules")
        if modules and now - self._calm_since >= CALM:
            try:
                self._standby = standby.start(self._command, modules, self._environ)
            except OSError as error:
                logger.warning("no standby can be kept: %s", error.strerror)
                self._command = None

    def wake(self, environ: Mapping[str, str]) -> Training | None:
        """Have the standby take the slot over; None if there is none that can.

        One that still imports is ended: nobody could tell a slow import from one that never ends.

        Args:
            environ: more for its environment.
        """
        self._calm_since = None
        woken = self._standby if self.is_warm else None
        if woken is not None and standby.wake(woken, environ):
            self._standby = None
            return woken
        self.drop()
        return None

    def drop(self) -> None:
        """End the standby, if there is one."""
        if self._standby is not None:
            self._standby.close()
            self._standby = None


def _is_stuck(standby: Reading) -> bool:
    """Return whether a standby has not become ready for so long that it never will."""
    return standby.phase != Phase.READY and standby.silent > STUCK
