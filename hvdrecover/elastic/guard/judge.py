"""Numbers that are not finite: the ranks exchange what they have found, and all react alike."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdrecover.data.order import SampleOrder, Stretch
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.companions import Moment, Observer, Table, Voter
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.guard import numerics
from hvdrecover.elastic.guard.numerics import Budget, Sighting
from hvdrecover.elastic.guard.settings import Guard, Numerics
from hvdrecover.errors import ConfigError, HvdrecoverError, NumericsError

_FOLLOWS = {
    "raise": "stopping",
    "skip": "no rank applies the step",
    "rollback": "going back to the last commit",
}


_EARLIER = ["gradients of a step before this commit; the step was not applied"]


class RolledBack(Exception):  # noqa: N818  no error: all ranks go back to a commit together
    """A step is bad, and all ranks go back to the last commit.

    Attributes:
        order: of the samples that are left out then; None if none are.
        samples: these samples.
    """

    def __init__(self, order: SampleOrder | None = None, samples: Stretch = (0, 0, 0, 0)) -> None:
        super().__init__("a step whose numbers are not finite is rolled back")
        self.order = order
        self.samples = samples


class Judge(Observer, Voter):
    """One rank's part in finding bad steps and reacting to them.

    Args:
        guard: the user's settings. If None, or if they ignore numbers, nothing is checked.
        context: the state's surroundings.

    Attributes:
        steps: returns how many steps this rank has done; an adapter knows.
        verdict_on: returns the verdict that a framework's own error comes to, or the error; an adapter's.
    """

    def __init__(self, guard: Guard | None, context: Context) -> None:
        self._policy: Numerics | None = guard.numerics if guard is not None else None
        self._allowed = guard.numerics_budget if guard is not None else 0
        self._context = context
        self._framework = context.framework
        self._world = context.world
        self._contents = context.contents
        self._host = context.config.host
        self._budget = Budget()
        self._verdict: NumericsError | RolledBack | None = None
        self._skipped = False
        self._waits = False  # a bad step is rolled back as soon as `record` names its batch
        self._losses: Any = 0.0  # zero, if all that were reported are finite; else NaN
        self._bad: list[str] = []
        self.steps: Callable[[], int] = lambda: 0
        self.verdict_on: Callable[[BaseException], BaseException] = lambda error: error

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank()

    @property
    def skips(self) -> bool:
        """Return whether `gradients` may return; otherwise it always raises."""
        return self._policy == "skip"

    def refuse_sums(self, passes: int) -> None:
        """Refuse to leave out batches of steps that each have the sum of several.

        Raises:
            ConfigError: they are to be left out.
        """
        if self._policy == "rollback" and passes > 1:
            raise ConfigError(
                "numerics",
                f"'rollback' leaves out one bad batch, but with backward_passes_per_step={passes} a step "
                "sums up several batches. Pass Guard(numerics='skip')",
            )

    # -- an observer -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Have the framework report bad steps.

        Raises:
            ConfigError: batches are to be left out, and no sampler can do so.
        """
        if self._policy == "rollback":
            if not self._contents.orders:
                raise ConfigError(
                    "numerics",
                    "'rollback' leaves a bad batch out of the epoch, but the state has no sampler for that. "
                    "Put the ElasticSampler or the elastic_dataset into the state, or pass "
                    "Guard(numerics='skip')",
                )
            self._contents.on_record.insert(0, self._recorded)  # before listeners that would count the batch
        if self._policy is not None:
            self._framework.report_gradients(self._contents, self)

    def observed(self, values: Mapping[str, Any]) -> None:
        """Take a loss, without waiting for a device."""
        if self._policy is not None and "loss" in values:
            self._losses = self._losses + values["loss"] * 0

    def rolled_back(self) -> None:
        """Forget the losses of steps that are repeated, or left out."""
        self._losses, self._waits = 0.0, False

    # -- a voter ---------------------------------------------------------------------------------------

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        """Return an error if trained parameters are NaN or infinite, or losses at a commit.

        If a step was skipped since the last commit, losses are taken for that step's.
        """
        self._bad = []
        if self._policy is None:
            return None
        if committing:
            losses, self._losses = self._losses, 0.0
            skipped, self._skipped = self._skipped, False
            self._bad = [] if skipped or math.isfinite(float(losses)) else ["loss"]
        self._bad += self._bad_parameters()
        if self._waits:
            return _unknown_batch(_EARLIER)
        if not self._bad:
            return None
        remedy = "The commit is not written; the last durable one stands. Look at the steps since."
        return NumericsError([f"{each} on rank {self.rank}" for each in self._bad], remedy)

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send whether there was an objection to the commit."""
        return () if moment.kind == "rendezvous" else [bool(self._bad and moment.kind == "commit")]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Return what is done about numbers of some rank that are not finite, if there are any."""
        if self._waits and moment.kind == "commit":
            return _unknown_batch(_EARLIER)
        if self._policy is None or not table.any():
            return None
        mine = Sighting(self._world.rank(), self._host, tuple(self._bad))
        # The steps were applied, so they cannot be skipped.
        action, error = self._judged("raise" if self._policy == "raise" else "rollback", (), mine)
        return RolledBack() if action == "rollback" else error

    def cause(self, error: BaseException) -> BaseException | None:
        """Return the verdict on a step: frameworks make other errors of it on its way through a graph."""
        return self.take_verdict() or self.verdict_on(error)

    def take_verdict(self) -> NumericsError | RolledBack | None:
        """Return what was raised last about a step, once."""
        verdict, self._verdict = self._verdict, None
        return verdict

    # -- told by the framework's side ------------------------------------------------------------------

    def stepped(self) -> None:
        """An optimizer steps with finite gradients: the next batch recorded is the last of this step."""
        if self._policy == "rollback" and not self._waits:
            for order in self._contents.orders.values():
                order.stepped = True

    def gradients(self, everywhere: Sequence[str], here: Sequence[str], *, first: str = "") -> None:
        """All ranks have found gradients that are not finite. Returns if the step is to be skipped.

        A step that is to be rolled back is skipped at first if its batch size is not known: sizes of tensors
        would be a guess. All ranks go back at the next `SampleOrder.record`, which tells the samples.

        Args:
            everywhere: those that are not finite on all ranks.
            here: those that were not, before they were summed, on this rank.
            first: what was not finite before all else on this rank, in words; empty if unknown.

        Raises:
            NumericsError: the user wants to know, or it was too often.
            RolledBack: all ranks go back to the last commit.
        """
        assert self._policy is not None
        mine = self._seen(_gradients(here), first)
        may_wait = not all(order.batch_size for order in self._contents.orders.values())
        self._act(*self._judged(self._policy, _gradients(everywhere), mine), may_wait=may_wait)

    def reported(self, found: str, *, here: bool) -> None:
        """All ranks have found a bad step, and on this one the framework has raised an error out of it.

        Args:
            found: what its error is about.
            here: whether it was found on this rank, and is not what others have sent.

        Raises:
            NumericsError: the user wants to know, or it was too often.
            RolledBack: all ranks go back to the last commit; the step can't be skipped any more.
        """
        mine = self._seen((found,) if here else (), "")
        policy: Numerics = "raise" if self._policy == "raise" else "rollback"
        self._act(*self._judged(policy, (found,), mine), may_wait=False)

    def _bad_parameters(self) -> list[str]:
        """Return which of this rank's trained parameters are NaN or infinite."""
        return [
            f"parameter {name}.{inner}"
            for name, component in self._contents.components().items()
            for inner in self._framework.not_finite(self._framework.trained(component))
        ]

    def _seen(self, tensors: tuple[str, ...], first: str) -> Sighting:
        mine = Sighting(self._world.rank(), self._host, tensors, first)
        order = self._contents.order_in_use()
        if order is None or not tensors:
            return mine
        return dataclasses.replace(mine, epoch=order.epoch, samples=tuple(order.present()))

    def _act(self, action: Numerics, error: NumericsError, *, may_wait: bool) -> None:
        self._verdict = error if action == "raise" else None
        order = self._contents.order_in_use()
        if action == "rollback" and order is not None and order.batch_size:
            self._verdict = RolledBack(order, order.stretch(order.done, order.batch_size))
        elif action == "rollback":
            self._waits = may_wait
            self._verdict = None if may_wait else _unknown_batch(error.findings)
        if self._verdict is not None:
            raise self._verdict

    def _recorded(self, order: SampleOrder, count: int) -> None:
        """Roll a bad step back, as its batch is known: the samples since the step before, and these."""
        if self._waits:
            raise RolledBack(order, order.stretch(order.unstepped, count))

    def _judged(
        self, policy: Numerics, everywhere: Sequence[str], mine: Sighting
    ) -> tuple[Numerics, NumericsError]:
        """Exchange what each rank has seen; return what all do about it, and the error if they raise one."""
        step = self.steps()
        mine = dataclasses.replace(mine, used=self._budget.used(step))
        fields = {**dataclasses.asdict(mine), "policy": policy}
        rows = gather_json(self._world, fields, "hvdrecover.guard.numerics")
        if "rollback" in [row.pop("policy") for row in rows]:
            policy = "rollback"  # where one has left its step, nobody can skip it
        sightings = [Sighting.from_json(row) for row in rows]
        self._budget.bad(step)
        action = numerics.decide(policy, sightings, self._allowed)
        lines = numerics.findings(sightings, everywhere)
        message = f"numbers that are not finite: {'; '.join(lines)}; {_FOLLOWS[action]}"
        self._context.announce(
            "numerics",
            message,
            level=logging.WARNING,
            action=action,
            findings=[dataclasses.asdict(each) for each in sightings if each.tensors],
        )
        self._skipped = action == "skip"
        return action, self._error(lines, max(each.used for each in sightings))

    def _error(self, lines: list[str], used: int) -> NumericsError:
        if self._policy == "raise":
            remedy = "Look at these samples; Guard(numerics='skip') or 'rollback' continues without them."
        else:
            remedy = "Look at these samples, at the learning rate and at the loss."
        spent = f"{used} of the last {numerics.WINDOW} steps were bad before this one. " if used else ""
        return NumericsError(lines, f"{spent}{remedy}")


def _unknown_batch(findings: list[str]) -> NumericsError:
    return NumericsError(
        findings,
        "The samples of the bad batch are unknown, so 'rollback' cannot leave them out. Train on the "
        "state's ElasticSampler or elastic_dataset, and call record_batch() after each step, before the "
        "commit. Or pass Guard(numerics='skip'), which does not need the samples.",
    )


def _gradients(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"gradient of {name}" for name in names)
