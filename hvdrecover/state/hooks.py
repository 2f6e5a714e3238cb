"""Hooks: features such as the guard that take part in a rank's commits and recoveries.

The path of a commit and of a recovery knows no hook by name. `hvdrecover.state.commit` lists the hooks.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from hvdrecover import heartbeat
from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.config import PREEMPTED, Config
from hvdrecover.errors import HvdrecoverError
from hvdrecover.events import Events
from hvdrecover.heartbeat import Stop
from hvdrecover.machine import Clock
from hvdrecover.state.adapter import Framework, World
from hvdrecover.state.contents import Contents
from hvdrecover.state.horovod import hosts_updated
from hvdrecover.state.memory import Memory
from hvdrecover.state.rank_local import Place, Ranks

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Source = Literal["memory", "near", "durable", "initial"]
Table = npt.NDArray[np.int64]
"""The numbers of all ranks; of shape ``[size, n]``."""


@dataclass(frozen=True)
class Context:
    """The surroundings of one rank's state, which each hook is given."""

    framework: Framework
    world: World
    contents: Contents
    config: Config
    events: Events
    clock: Clock
    place: Place
    ranks: Ranks

    def announce(self, kind: str, message: str, *, level: int = logging.INFO, **facts: Any) -> None:
        """Emit an event on every rank, with a line on the terminal from rank 0 only."""
        self.events.emit(kind, message if self.world.rank() == 0 else None, level=level, **facts)


@dataclass(frozen=True)
class Agreement:
    """The state that all ranks resume from."""

    snapshot: Snapshot
    source: Source
    job: str
    loaded: str = ""  # the name of the near or durable commit that it came from, if any


Occasion = Literal["commit", "check", "rendezvous"]


@dataclass(frozen=True)
class Election:
    """The outcome of an election of the source rank; see `hvdrecover.state.rendezvous.elect`."""

    root: int
    newest: CommitId | None
    holders: tuple[int, ...] = ()  # the ranks that hold the newest commit, in their memory if any does
    # Whether all processes have just started, and some of their hosts have commits of an earlier start. Then
    # `newest` is None until the checkpoint root has been asked which of them count.
    revives: bool = False


@dataclass(frozen=True)
class Moment:
    """A vote and its circumstances."""

    kind: Occasion  # a check looks for changes between commits
    held: Snapshot | None = None  # at a rendezvous, the newest commit in this rank's memory
    elected: Election | None = None  # at a rendezvous, once all have sent their numbers
    returned: bool = False  # whether the training function has returned, so that no step is under way


class Hook:
    """Takes part in commits and recoveries; each method does nothing by default."""

    key: str = ""  # the name of its JSON in a commit; empty for a hook that keeps none
    votes_at: Sequence[Occasion] = get_args(Occasion)  # when `numbers` and `verdict` are called
    inspects: bool = True  # whether `inspect` is called; all ranks have the same answer

    # Observe. A hook that raises an exception here is reported once and no longer notified; training
    # continues.

    def observed(self, values: Mapping[str, Any]) -> None:
        """Called when the script reports numbers of a step, by name."""

    def begins(self) -> None:
        """Called when a commit begins."""

    def captured(self, snapshot: Snapshot) -> None:
        """Called when a commit has been copied into this rank's memory."""

    def committed(self) -> None:
        """Called when a commit has ended on all ranks, or this rank has skipped it; training continues."""

    def agreed(self, agreement: Agreement) -> None:
        """Called when the ranks have agreed on the state from which they resume."""

    def rolled_back(self) -> None:
        """Called when the attributes have been rolled back to the last commit."""

    def closing(self) -> None:
        """Called when the training function has returned."""

    def leaving(self) -> None:
        """Called when this process stops before the run is finished: it leaves, or an error ends it."""

    # Keep JSON in each commit, under `key`.

    def capture(self) -> Json | None:
        """Return the JSON for a commit; None leaves it out."""
        return None

    def load(self, value: Json | None) -> None:
        """Load the JSON of a commit, and check it, as it may be invalid; None if the commit has none."""

    def resumed(self, value: Json | None) -> Json | None:
        """Return the JSON's new value when a job starts from a durable commit; on the source rank only."""
        return value

    # Vote. Errors are raised.

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        """Return the reason why the present state cannot be a commit, or must not become durable."""
        # ``committing``: all ranks are at a commit, and this one skips it if there is a reason. Otherwise the
        # commit stays in memory, and the reason is raised when it is to become durable.
        return None

    def inspect(self, memory: Memory) -> bool:
        """Inspect a commit on all ranks; return whether this rank's tensors in it were replaced."""
        return False

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Return the numbers that this rank sends: at checks and commits, the same count on all ranks."""
        return ()

    def prefer(self, holders: Sequence[int], table: Table) -> Sequence[int]:
        """Return the holders of the newest commit that may become the source rank; at least one."""
        return holders

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Return the error that all ranks raise, decided from the numbers of all ranks; None to continue."""
        return None

    def resuming(self, stored: Snapshot, where: str) -> None:
        """Called on the source rank before it loads a durable commit; may raise an error."""


class Hooks:
    """The hooks of one rank, in the same order on all ranks; the first verdict counts."""

    def __init__(self, hooks: Iterable[Hook]) -> None:
        every = tuple(hooks)
        # A commit calls only the hooks that define a method. Most hooks define a few methods.
        self._of: dict[str, list[Hook]] = {
            name: [hook for hook in every if getattr(type(hook), name) is not method]
            for name, method in vars(Hook).items()
            if callable(method)
        }
        self._of["inspect"] = [hook for hook in self._of["inspect"] if hook.inspects]
        voters = [hook for hook in every if hook in self._of["numbers"] or hook in self._of["verdict"]]
        self._voters = {
            occasion: [hook for hook in voters if occasion in hook.votes_at]
            for occasion in get_args(Occasion)
        }
        self.kept = [hook for hook in every if hook.key]
        self._failed: set[Hook] = set()

    def notify(self, method: Callable[..., None], *facts: Any) -> None:
        """Call an observing method of `Hook` on all hooks."""
        for hook in self._of[method.__name__]:
            if hook not in self._failed:
                try:
                    getattr(hook, method.__name__)(*facts)
                except Exception as error:
                    self._failed.add(hook)
                    logger.warning("%s fails and is left out from now on: %r", type(hook).__name__, error)

    def ask(self, method: Callable[..., Result], *facts: Any, **options: Any) -> list[Result]:
        """Call a method of `Hook` on all hooks that define it; errors are raised."""
        return [getattr(hook, method.__name__)(*facts, **options) for hook in self._of[method.__name__]]

    def objection(self, *, committing: bool) -> HvdrecoverError | None:
        return next(filter(None, self.ask(Hook.objection, committing=committing)), None)

    def send(self, world: World, moment: Moment, own: Sequence[int] = ()) -> Callable[[], list[Table]]:
        """Send the numbers in ``own`` and of each voter in one allgather; return a wait for their tables."""
        rows = [list(own), *(list(hook.numbers(moment)) for hook in self._voters[moment.kind])]
        name = "election" if moment.kind == "rendezvous" else "updates"
        sent = world.send([number for row in rows for number in row], f"hvdrecover.{name}")

        def hear() -> list[Table]:
            table, ends = sent(), accumulate(map(len, rows))
            return [table[:, end - len(row) : end] for row, end in zip(rows, ends, strict=True)]

        return hear

    def prefer(self, holders: Sequence[int], tables: Sequence[Table]) -> Sequence[int]:
        for hook, table in zip(self._voters["rendezvous"], tables, strict=True):
            holders = hook.prefer(holders, table)
        return holders

    def verdict(self, moment: Moment, tables: Sequence[Table]) -> BaseException | None:
        voters = zip(self._voters[moment.kind], tables, strict=True)
        # Ask all voters: some exchange more data for their verdict.
        found = [hook.verdict(moment, table) for hook, table in voters]
        return next(filter(None, found), None)


# -- warnings of values that a recovery or a restart does not restore; each is given once, in advance ------


class Unresumed(Hook):
    """Warns of components whose tensors commits lack, and of settings that a resumed run ignores."""

    key = "settings"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._said: set[str] = set()
        found: dict[str, list[str]] = {}  # such as ``optimizer.lr``, for each group of the optimizer
        for name, component in context.contents.components().items():
            for entry in context.framework.describe(component):
                if entry.stored:
                    found.setdefault(f"{name}.{entry.name.rpartition('.')[2]}", []).append(entry.value)
        self._of_script = {
            name: ", ".join(values if len(set(values)) > 1 else values[:1]) for name, values in found.items()
        }
        # The settings that the run was started with, which each commit holds. The script's are compared with
        # these, not with the optimizer's present ones, which training changes.
        self._of_run: dict[str, Json] = dict(self._of_script)

    def agreed(self, agreement: Agreement) -> None:
        for name, component in self._context.contents.components().items():
            self._context.framework.forget_passes(component)  # all ranks count backward passes from 0 again
            if name not in self._said and (lost := self._context.framework.unkept(component)):
                self._said.add(name)
                kind = type(component).__name__
                message = (
                    f"state.{name}: commits do not hold {', '.join(lost)}, as the state_dict() of this {kind}"
                    " leaves that out. After a recovery, it has the values of a new object or of an "
                    "interrupted step. Make it persistent (with torchmetrics: metric.persistent(True)), or "
                    "keep it in the state, as a tensor or a plain value"
                )
                self._context.announce("not_kept", message, level=logging.WARNING, attribute=name)

    def capture(self) -> Json:
        return dict(self._of_run)

    def load(self, value: Json | None) -> None:
        self._of_run = dict(value if isinstance(value, dict) else self._of_script)  # older commits have none

    def resumed(self, value: Json | None) -> Json | None:
        of_run: Mapping[str, Json] = value if isinstance(value, dict) else {}
        lines = [
            f"{name} to {mine}, but the run was started with {of_run[name]}"
            for name, mine in self._of_script.items()
            if of_run.get(name, mine) != mine
        ]
        if lines:
            message = (
                f"the script sets {'; '.join(lines)}. The commit's values are used. To change a value in a "
                "resumed run, set it inside the training function"
            )
            self._context.announce("settings_ignored", message, level=logging.WARNING, differences=lines)
        return value


# -- departures and changes of hosts: how a process learns of them, and which ranks leave ------------------


class Preempted(SystemExit):
    """This process was asked to leave, and does so at a commit; its exit code is 75 (``EX_TEMPFAIL``)."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


class Departure(Exception):  # noqa: N818  not an error: the ranks have decided it together
    """Ranks leave at a commit that all have made; if ``whole``, all leave, and a later start continues."""

    def __init__(self, leaving: Sequence[bool], *, whole: bool) -> None:
        super().__init__("ranks leave")
        self.leaving = tuple(leaving)
        self.whole = whole


class Leaving(Hook):
    """Votes on which ranks leave, as after a preemption, and on whether hosts have come or gone."""

    votes_at = ("commit", "check")

    def __init__(self, config: Config) -> None:
        self._elastic = config.elastic
        self._host = zlib.crc32(config.host.encode())
        self.hosts_changed = threading.Event()

    def numbers(self, moment: Moment) -> Sequence[int]:
        return [heartbeat.page.stop, self._host, self.hosts_changed.is_set()]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        asked, hosts, changes = table.T.tolist()
        if any(asked) and (departure := decide(asked, hosts, elastic=self._elastic)) is not None:
            return departure
        # If any rank knows of a change since the last rendezvous, all ranks meet in another one.
        return hosts_updated() if self._elastic and any(changes) else None


def decide(asked: Sequence[int], hosts: Sequence[int], *, elastic: bool) -> Departure | None:
    """Decide which ranks leave, if any; from each rank's `Stop` and host."""
    emptied = {host for host, stop in zip(hosts, asked, strict=True) if stop != Stop.NO}
    whole = Stop.JOB in asked or (bool(emptied) and (not elastic or emptied == set(hosts)))
    leaving = [whole or host in emptied for host in hosts]  # Horovod gives up hosts, not ranks
    return Departure(leaving, whole=whole) if any(leaving) else None
