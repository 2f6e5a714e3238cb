"""Numbers that are not finite: all ranks tell each other what they have seen, and do the same about it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from hvdrecover.elastic.contents import Contents
from hvdrecover.elastic.guard import numerics
from hvdrecover.elastic.guard.numerics import Budget, Sighting
from hvdrecover.elastic.guard.settings import Guard, Numerics
from hvdrecover.elastic.interfaces import Framework, World
from hvdrecover.elastic.recovery import gather_json
from hvdrecover.errors import NumericsError
from hvdrecover.events import Events

_FOLLOWS = {
    "raise": "stopping",
    "skip": "no rank applies the step",
    "rollback": "going back to the last commit",
}


class RolledBack(Exception):  # noqa: N818  no error: all ranks go back to a commit together
    """A step is bad, and all ranks go back to the last commit.

    Attributes:
        batch_size: samples in one rank's batch, which are left out then; 0 if unknown.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__("a step whose numbers are not finite is rolled back")
        self.batch_size = batch_size


class Judge:
    """One rank's side of it.

    Args:
        guard: what the user has decided; it looks at numbers.
        framework: facts about the framework.
        world: the ranks.
        contents: the state's attributes.
        events: takes what is found.
        host: this rank's host.

    Attributes:
        steps: tells how many steps this rank has done; an adapter knows.
    """

    def __init__(
        self,
        guard: Guard,
        framework: Framework,
        world: World,
        contents: Contents,
        events: Events,
        host: str,
    ) -> None:
        assert guard.numerics is not None
        self._policy = guard.numerics
        self._allowed = guard.numerics_budget
        self._framework = framework
        self._world = world
        self._contents = contents
        self._events = events
        self._host = host
        self._budget = Budget()
        self._verdict: NumericsError | RolledBack | None = None
        self._skipped = False
        self.steps: Callable[[], int] = lambda: 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank()

    @property
    def skips(self) -> bool:
        """Whether `gradients` may return; otherwise it always raises."""
        return self._policy == "skip"

    def not_finite(self, losses: Sequence[str]) -> list[str]:
        """What of this rank's is NaN or infinite at a commit: its losses and its trained parameters.

        Args:
            losses: as the script has told since the last commit. If a step was skipped since then, they are
                taken for that step's.
        """
        skipped, self._skipped = self._skipped, False
        return [*(() if skipped else losses), *self.bad_parameters()]

    def unfit(self, bad: Sequence[str]) -> NumericsError:
        """Return the error that keeps a commit with these parameters from the storage."""
        remedy = "The commit is not written; the last durable one stands. Look at the steps since."
        return NumericsError([f"{each} on rank {self.rank}" for each in bad], remedy)

    def bad_parameters(self) -> list[str]:
        """Return which of this rank's trained parameters are NaN or infinite."""
        return [
            f"parameter {name}.{inner}"
            for name, component in self._contents.components().items()
            for inner in self._framework.not_finite(component)
        ]

    def gradients(
        self, everywhere: Sequence[str], here: Sequence[str], *, first: str = "", batch_size: int = 0
    ) -> None:
        """All ranks have met gradients that are not finite. Returns if the step is to be skipped.

        Args:
            everywhere: those that are not finite on all ranks.
            here: those that were not, before they were summed, on this rank.
            first: what was not finite before all else on this rank, in words; empty if unknown.
            batch_size: samples in this rank's batch; 0 if unknown.

        Raises:
            NumericsError: the user wants to know, or it was too often.
            RolledBack: all ranks go back to the last commit.
        """
        mine = self._seen(_gradients(here), first, batch_size)
        self._judge(self._policy, _gradients(everywhere), mine, batch_size)

    def reported(self, found: str, *, here: bool, batch_size: int = 0) -> None:
        """All ranks have met a bad step, and on this one the framework has raised an error out of it.

        Args:
            found: what its error is about.
            here: whether it was met on this rank, and is not what others have sent.
            batch_size: samples in this rank's batch; 0 if unknown.

        Raises:
            NumericsError: the user wants to know, or it was too often.
            RolledBack: all ranks go back to the last commit; the step can't be skipped any more.
        """
        mine = self._seen((found,) if here else (), "", batch_size)
        self._judge("raise" if self._policy == "raise" else "rollback", (found,), mine, batch_size)

    def parameters(self, here: Sequence[str]) -> None:
        """Some ranks have parameters that are not finite, and all have heard of it.

        Args:
            here: those of this rank, as `not_finite` gave them.

        Raises:
            NumericsError: the user wants to know, or it was too often.
            RolledBack: all ranks go back to the last commit; there is nothing to be skipped any more.
        """
        mine = Sighting(self._world.rank(), self._host, tuple(here))
        self._judge("raise" if self._policy == "raise" else "rollback", (), mine, 0)

    def take_verdict(self) -> NumericsError | RolledBack | None:
        """What was raised last, once: frameworks make other errors of it on its way through a graph."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def _seen(self, tensors: tuple[str, ...], first: str, batch_size: int) -> Sighting:
        mine = Sighting(self._world.rank(), self._host, tensors, first)
        order = self._contents.order_in_use()
        if order is None or not tensors:
            return mine
        return dataclasses.replace(mine, epoch=order.epoch, samples=tuple(order.present(batch_size)))

    def _judge(self, policy: Numerics, everywhere: Sequence[str], mine: Sighting, batch_size: int) -> None:
        step = self.steps()
        mine = dataclasses.replace(mine, used=self._budget.used(step))
        fields = {**dataclasses.asdict(mine), "batch_size": batch_size, "policy": policy}
        rows = gather_json(self._world, fields, "hvdrecover.guard.numerics")
        batch_size = max(row.pop("batch_size") for row in rows)
        if "rollback" in [row.pop("policy") for row in rows]:
            policy = "rollback"  # where one has left its step, nobody can skip it
        sightings = [Sighting.from_json(row) for row in rows]
        self._budget.bad(step)
        action = numerics.decide(policy, sightings, self._allowed)
        lines = numerics.findings(sightings, everywhere)
        message = f"numbers that are not finite: {'; '.join(lines)}; {_FOLLOWS[action]}"
        self._events.emit(
            "numerics",
            message if self._world.rank() == 0 else None,
            level=logging.WARNING,
            action=action,
            findings=[dataclasses.asdict(each) for each in sightings if each.tensors],
        )
        self._skipped = action == "skip"
        if action != "skip":
            used = max(each.used for each in sightings)
            self._verdict = RolledBack(batch_size) if action == "rollback" else self._error(lines, used)
            raise self._verdict

    def _error(self, lines: list[str], used: int) -> NumericsError:
        if self._policy == "raise":
            remedy = "Look at these samples; Guard(numerics='skip') or 'rollback' goes on without them."
        else:
            remedy = "Look at these samples, at the learning rate and at the loss."
        spent = f"{used} of the last {numerics.WINDOW} steps were bad before this one. " if used else ""
        return NumericsError(lines, f"{spent}{remedy}")


def _gradients(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"gradient of {name}" for name in names)
