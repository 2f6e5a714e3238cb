"""Gradients that are not finite, or missing: the ranks exchange their findings, and all react alike.

1. A gradient that is NaN or infinite on one rank is so on all ranks after the allreduce. So all ranks see a
   bad step without a message, before an optimizer applies it.
2. Each rank says which of its own gradients were not finite, and for which samples.
3. All ranks raise, skip the step, or roll back and leave the batch out. A spent budget of bad steps raises.

Parameters are checked before each commit, so that no commit holds NaN.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hvdrecover.data.order import SampleOrder, Stretch
from hvdrecover.errors import ConfigError, HvdrecoverError, NumericsError
from hvdrecover.guard import Guard, Numerics
from hvdrecover.guard.comparison import first_lines, named
from hvdrecover.state.adapter import gather_json
from hvdrecover.state.hooks import Context, Hook, Moment, Table

WINDOW = 1000  # steps over which bad steps are counted
_LISTED = 8  # tensors or samples in a message; events have all
_EARLIER = "gradients of a step before this commit; the step was not applied"
_FOLLOWS = {
    "raise": "stopping",
    "skip": "no rank applies the step",
    "rollback": "going back to the last commit",
}


class RolledBack(Exception):  # noqa: N818  no error: all ranks go back to a commit together
    """A step is bad, and all ranks go back to the last commit, and leave these samples of an order out."""

    def __init__(self, order: SampleOrder | None = None, samples: Stretch = (0, 0, 0, 0)) -> None:
        super().__init__("a step whose numbers are not finite is rolled back")
        self.order = order
        self.samples = samples


class Judge(Hook):
    """One rank's part in finding bad steps and reacting to them."""

    votes_at = ("commit", "check")

    def __init__(self, guard: Guard, context: Context) -> None:
        self.policy: Numerics | None = guard.numerics  # None checks nothing
        # Returns how many steps this rank has done. An adapter that does not report each step sets it.
        self.steps: Callable[[], int] = lambda: self._reported
        self._reported = 0  # steps, finite or not
        self._allowed = guard.numerics_budget
        self._context = context
        self._world = context.world
        self._contents = context.contents
        self._bad_steps: list[int] = []
        self._bad_parameters: list[str] = []
        self.knows_steps = False  # whether the adapter calls `stepped`
        self._waits = False  # a bad step is rolled back as soon as `record` tells the size of its batch
        if self.policy == "rollback":
            if not self._contents.orders:
                raise ConfigError(
                    "numerics",
                    "'rollback' leaves a bad batch out of the epoch, but the state has no sampler for that. "
                    "Put the ElasticSampler or the elastic_dataset into the state, or pass "
                    "Guard(numerics='skip')",
                )
            self._contents.on_record.insert(0, self._recorded)  # before listeners that would count the batch
        if self.policy is not None:
            self._context.framework.report("gradients", self)

    def rolled_back(self) -> None:
        self._waits = False  # a fault has undone the bad step

    # -- gradients, as an adapter reports them ---------------------------------------------------------

    def stepped(self) -> None:
        """An optimizer steps with finite gradients: the next batch recorded is the last of this step."""
        self._reported += 1
        if not self._waits:
            self._step_ends()

    def _step_ends(self) -> None:
        for order in self._contents.orders.values():
            order.stepped = True

    def gradients(self, everywhere: Sequence[str], here: Sequence[str]) -> None:
        """Decide about a step with gradients that are not finite; return if it is to be skipped."""
        assert self.policy is not None
        self._reported += 1
        order = self._contents.order_in_use()
        # Those whose gradient was not finite on this rank, and all whose average is not.
        mine, every = ([f"gradient of {name}" for name in names] for names in (here, everywhere))
        action, error = self._judged(self.policy, mine, every, order if here else None)
        if action == "raise":
            raise error
        if action == "rollback":
            if order is not None and order.batch_size:
                raise RolledBack(order, order.stretch(order.done, order.batch_size))
            if all(each.batch_size for each in self._contents.orders.values()):
                raise _unknown_batch(error.findings)  # trained on other data than the state's
            # With torch only the next `SampleOrder.record` tells the samples of a batch: sizes of tensors
            # would be a guess. So the step is skipped at first, and all ranks go back at that call.
            self._waits = True
        else:
            self._step_ends()

    def _recorded(self, order: SampleOrder, count: int) -> None:
        """Roll a bad step back: its batch is the samples since the step before, and these."""
        if self._waits:
            raise RolledBack(order, order.stretch(order.unstepped, count))

    # -- parameters, at each commit --------------------------------------------------------------------

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        if self.policy is None:
            return None
        self._bad_parameters = [
            f"parameter {name}.{inner}"
            for name, component in self._contents.components().items()
            for inner in self._context.framework.not_finite(component)
        ]
        if self._waits:
            return _unknown_batch([_EARLIER])
        if not self._bad_parameters:
            return None
        remedy = "The commit is not written; the last durable one stands. Look at the steps since."
        lines = [f"{each} on rank {self._world.rank()}" for each in self._bad_parameters]
        return NumericsError(lines, remedy)

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send whether there was an objection to the commit."""
        return [bool(self._bad_parameters and moment.kind == "commit")]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        if self._waits and moment.kind == "commit":
            return _unknown_batch([_EARLIER])
        if self.policy is None or not table.any():
            return None
        # The steps were applied, so they cannot be skipped.
        policy: Numerics = "raise" if self.policy == "raise" else "rollback"
        action, error = self._judged(policy, self._bad_parameters, [])
        return error if action == "raise" else RolledBack()

    # -- the verdict -----------------------------------------------------------------------------------

    def _judged(
        self, policy: Numerics, tensors: list[str], everywhere: list[str], order: SampleOrder | None = None
    ) -> tuple[Numerics, NumericsError]:
        """Exchange the findings; return the action of all ranks, and the error in case they raise one."""
        step = self.steps()
        self._bad_steps = [each for each in self._bad_steps if each > step - WINDOW]
        mine = {
            "tensors": tensors,  # not finite on this rank, before the allreduce
            "rank": self._world.rank(),
            "host": self._context.config.host,
            "epoch": -1 if order is None else order.epoch,
            "samples": [] if order is None else order.present(whole_step=self.knows_steps),  # as far as known
            "used": len(self._bad_steps),
        }
        self._bad_steps.append(step)
        rows = gather_json(self._world, mine, "hvdrecover.guard.numerics")
        used = max(row["used"] for row in rows)  # a rank that was started later knows of fewer
        action = policy if used < self._allowed else "raise"
        lines = _findings(rows, everywhere)
        self._context.announce(
            "numerics",
            f"numbers that are not finite: {'; '.join(lines)}; {_FOLLOWS[action]}",
            level=logging.WARNING,
            action=action,
            findings=[row for row in rows if row["tensors"]],
        )
        if self.policy == "raise":
            remedy = "Look at these samples; Guard(numerics='skip') or 'rollback' continues without them."
        else:
            remedy = "Look at these samples, at the learning rate and at the loss."
        spent = f"{used} of the last {WINDOW} steps were bad before this one. " if used else ""
        return action, NumericsError(lines, f"{spent}{remedy}")


def _findings(rows: Sequence[dict[str, Any]], everywhere: list[str]) -> list[str]:
    """A line for each rank with a finding; or else one about ``everywhere``, the averages that are bad."""
    lines = []
    for row in rows:
        if row["tensors"]:
            samples = (
                f", at samples {_listed(row['samples'])} of epoch {row['epoch']}" if row["samples"] else ""
            )
            lines.append(f"rank {row['rank']} on {row['host']}{samples}: {_listed(row['tensors'])}")
    ranks = named(range(len(rows)))
    return lines or [f"finite on each of {ranks}, but not their sum: {_listed(everywhere)}"]


def _listed(items: Sequence[Any]) -> str:
    return ", ".join(first_lines([*map(str, items)], _LISTED))


def _unknown_batch(findings: list[str]) -> NumericsError:
    return NumericsError(
        findings,
        "The samples of the bad batch are unknown, so 'rollback' cannot leave them out. Train on the "
        "state's ElasticSampler or elastic_dataset, and call record_batch() after each step, before the "
        "commit. Or pass Guard(numerics='skip'), which does not need the samples.",
    )


class Missing(Hook):
    """The gradients that this rank has lacked since the last commit: Horovod sums up zeros in their place."""

    def __init__(self, context: Context) -> None:
        self.steps: Counter[str] = Counter()  # by parameter, in how many steps; an adapter counts
        self._context = context
        self._reported: set[str] = set()
        self._context.framework.report("missing", self)

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send a digest of the counts; 0 if no gradient was missing."""
        counts = json.dumps(self.steps, sort_keys=True).encode() if self.steps else b""
        return () if moment.kind == "rendezvous" else [zlib.crc32(counts)]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        if moment.kind != "rendezvous" and (table != table[0]).any():
            rows = gather_json(self._context.world, self.steps, "hvdrecover.guard.missing")
            found = {name: _missing_line(name, rows) for name in sorted(set().union(*rows) - self._reported)}
            self._reported.update(found)
            if found:
                lines = list(found.values())
                message = f"no gradient on some ranks, so zeros were summed up for them: {'; '.join(lines)}"
                self._context.announce("missing_gradients", message, level=logging.WARNING, parameters=lines)
        self.steps.clear()  # steps before a recovery are undone
        return None


def _missing_line(name: str, rows: Sequence[dict[str, int]]) -> str:
    ranks = [rank for rank, row in enumerate(rows) if name in row]
    steps = max(row.get(name, 0) for row in rows)
    return f"{name} on {named(ranks)}, in {steps} {'step' if steps == 1 else 'steps'}"
