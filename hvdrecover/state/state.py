"""The state of a training job, as its script sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, TypeVar, Unpack

from hvdrecover import config as configs
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.errors import ConfigError, StateError
from hvdrecover.events import of_training
from hvdrecover.guard.settings import Guard
from hvdrecover.scalars import as_numbers
from hvdrecover.state import commit as commits
from hvdrecover.state import run as runs
from hvdrecover.state.adapter import Framework, HiddenAttribute, World
from hvdrecover.state.contents import Contents
from hvdrecover.state.hooks import Context, Hook
from hvdrecover.state.horovod import rank as horovod_rank
from hvdrecover.state.liveness import paused
from hvdrecover.state.random import Randomness
from hvdrecover.state.rank_local import Place, Ranks
from hvdrecover.state.rendezvous import agree, reset
from hvdrecover.state.session import Session, settings_of
from hvdrecover.trackers import Tracker

Result = TypeVar("Result")

HOROVODS = frozenset(
    {
        "check_host_updates",
        "commit",
        "on_hosts_updated",
        "on_reset",
        "register_reset_callbacks",
        "reset",
        "restore",
        "save",
        "sync",
    }
)
"""Names of Horovod's states; no attribute can have one."""


class Keywords(TypedDict, total=False):
    """The settings that each class of states takes by keyword.

    Attributes:
        checkpoint: a `Checkpoint`, or just its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that
            nothing is written.
        rng: ``"reseed"`` seeds all global generators again at every commit, so a resumed run equals
            an undisturbed one; ``"store"`` leaves them alone and stores their states instead. None takes the
            class's default.
        guard: what is compared between the ranks; None compares nothing.
        tensorboard: path or URL of the folder for TensorBoard's runs, one for each rank; None writes none.
        tracker: an experiment tracker, to which rank 0 reports; None reports to none.
    """

    checkpoint: Checkpoint | str | None
    rng: Randomness | None
    guard: Guard | None
    tensorboard: str | None
    tracker: Tracker | None


_TAKES: dict[str, type | tuple[type, ...]] = {
    "checkpoint": (Checkpoint, str),
    "rng": str,
    "guard": Guard,
    "tensorboard": str,
    "tracker": Tracker,
}


class Yielding(Generic[Result]):
    """A property that a tracked attribute of the same name shadows."""

    def __init__(self, find: Callable[[Any], Result]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    def __get__(self, holder: Any, owner: type | None = None) -> Result:
        return self._find(holder)


class State:
    """Everything that a job must not lose.

    Attributes given by name become attributes of the state. Models, optimizers and whatever else has
    ``state_dict`` and ``load_state_dict`` are tracked in place, elastic samplers give their cursor, and all
    other values are plain objects that JSON must be able to hold (`hvdrecover.checkpoint.values`).

    Args:
        framework: facts about the framework.
        world: the ranks.
        config: the process's settings.
        clock: where times come from.
        hooks: the adapter's own.
        hidden: attributes that the adapter adds, by names that begin with an underscore.
        virtual: the virtual ranks; None if the job has none.
        attributes: what to track; and the keywords of `Keywords`.
        keywords: the same, apart from the attributes.

    Raises:
        ConfigError: a setting has no usable value, or an attribute's name is taken.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.

    After a recovery all ranks have one rank's copy of every attribute. A rank-local value, such as a running
    loss or batch norm's statistics, becomes another rank's unless it is a `PerRank`; a `Guard` warns of it.

    A script's attributes may have the names that this class adds to Horovod's, and those of its keywords if
    the value is not one for the keyword: they are tracked as any others, and ours make way.

    A subclass may have its own `save`, `restore`, `sync` and `reset`. They are called where Horovod would
    call them, but `restore` after the rendezvous, and ``super()`` does ours there. What they keep by
    themselves is not part of a commit.
    """

    _rng: Randomness = "reseed"  # what becomes of random generators if the script says nothing

    def __init__(
        self,
        framework: Framework,
        world: World,
        *,
        attributes: Mapping[str, Any],
        config: configs.Config | None = None,
        clock: Clock = SYSTEM_CLOCK,
        hooks: Sequence[Hook] = (),
        hidden: Mapping[str, HiddenAttribute] | None = None,
        virtual: Ranks | None = None,
        **keywords: Unpack[Keywords],
    ) -> None:
        config = config or configs.read()
        settings, attributes = _divide({**attributes, **keywords})
        _refuse_private(type(self))
        for name in attributes:
            vars(self).pop(name, None)  # a subclass may have set it before it called this
        self._due: dict[str, Callable[[], object]] = {}
        before = frozenset(vars(self))
        ranks = virtual or Ranks()
        self._contents = Contents(
            framework,
            attributes,
            set(dir(type(self))) - _yielding(type(self)),
            lambda: commits.iteration_begins(self._session),
            hidden,
            ranks,
        )
        events = of_training(config, clock)
        events.rank = horovod_rank()
        self._session = Session(
            Context(framework, world, self._contents, config, events, clock, Place(world, ranks), ranks),
            settings=settings_of(settings["checkpoint"], config),
            rng=ranks.rng(settings["rng"], type(self)._rng),
            guard=settings["guard"],
            tensorboard=settings["tensorboard"] and configs.absolute(settings["tensorboard"]),
            tracker=settings["tracker"],
            others=hooks,
            call=self._around,
        )
        self._session.memory.capture(CommitId(0, 0))
        self._session.hooks.attach()
        if type(self).reset is not State.reset:
            self._session.reset_callbacks.append(self.reset)
        self._make_way()
        self._taken = frozenset(vars(self).keys() - before)  # names that no attribute can have from now on

    # -- attributes ------------------------------------------------------------------------------------

    @Yielding
    def last_commit(self) -> CommitId:
        """The newest commit in this rank's memory; generation 0 before the first `sync`."""
        return self._session.memory.last

    @Yielding
    def last_durable(self) -> CommitId | None:
        """The newest commit that this rank has made durable; None on all ranks but 0."""
        return self._session.durable.last_durable

    @Yielding
    def finished(self) -> bool:
        """Return whether the run's training function has returned, in this start or an earlier one."""
        return self._session.memory.finished

    def log_metrics(self, loss: Any = None, **others: Any) -> None:
        """Report numbers of a step, best right after it: a line of each in TensorBoard, if that is asked for.

        Args:
            loss: this rank's, a number or a tensor of one; no device is waited for.
            others: more of them, by name.

        Raises:
            ConfigError: a value is not a number.
        """
        if self._session.context.ranks.replaying:
            return  # its process reports it
        values = as_numbers(self._session.context.framework, {"loss": loss, **others})
        self._session.hooks.notify(Hook.observed, values)

    # -- commits ---------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Bring all ranks to the job's newest commit, or to rank 0's initial state if there is none.

        For a script that trains in a plain loop, not in a function decorated by `run`. When a rank is lost in
        a job of ``hvdrecover run``, all processes end, and the script starts again from its beginning. Then
        this method restores the newest commit from the hosts' memory, or from the checkpoint root. It
        restores a finished run, too; see `finished`. Call it once, on all ranks, when all to track is set up.

        Raises:
            StateError: it was called before, or in a function decorated by `run`.
            ConfigError: the guard would have to roll back; or another state has used the checkpoint root.
            CheckpointError: the checkpoint root cannot be used.
            RecoveryError: ranks were lost meanwhile, or are at different states of the script.

        Examples:
            >>> state = recover.TorchState(epoch=0)
            >>> state.resume()
            >>> for state.epoch in range(state.epoch, 3):
            ...     state.commit()  # the job can go back to here
            >>> state.finish()
        """
        runs.resume(self)

    def commit(self, durable: bool = False) -> None:
        """Make a point that the job can go back to; then see whether hosts have come or gone.

        Args:
            durable: make this very commit durable, even if none is due. It is written in the background;
                `flush` waits for it. If an attempt to write an earlier one is under way, that is waited for.

        Raises:
            HostsUpdatedInterrupt: hosts have come or gone; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            UnsupportedValueError: a plain object that JSON can't hold.
            CheckpointError: as in `check_host_updates`.
            DivergedError: the ranks' parameters differ, and the state's guard is to raise it.
            NumericsError: parameters are not finite, and the state's guard is to raise it.
        """
        if self._session.context.config.elastic:
            self._refuse_early("state.commit()")
        commits.commit(self._session, durable=durable)

    def save(self) -> None:
        """Make a commit in this rank's memory only, without a word to the others."""
        self._due.pop("save", lambda: commits.keep_alone(self._session))()

    def restore(self) -> None:
        """Return to the newest commit in this rank's memory.

        Raises:
            RecoveryError: a commit was interrupted while it was being made, so memory holds none.
        """
        self._due.pop("restore", lambda: commits.roll_back(self._session))()

    def sync(self) -> None:
        """Bring all ranks to one commit; see `hvdrecover.state.rendezvous.agree`."""
        self._due.pop("sync", lambda: agree(self._session))()

    def check_host_updates(self) -> None:
        """See whether hosts have come or gone, and whether the job must stop; all ranks find the same.

        Raises:
            HostsUpdatedInterrupt: they have; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            FencedError: another job has taken the checkpoint root.
            DurableAgeError: commits cannot be made durable for longer than ``HVDRECOVER_MAX_DURABLE_AGE``.
            StoppedError: rank 0 has had one of these; raised on the other ranks.
        """
        commits.check(self._session)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest commit is durable; on ranks other than 0 there is nothing to wait for.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.

        Raises:
            FlushTimeoutError: the time is over; the write continues.
            StorageError: a handful of attempts have failed; the writer continues trying.
            FencedError: another job has taken the checkpoint root.
            NumericsError: the newest commit has parameters that are not finite, and the state has a guard.
        """
        with paused():
            self._session.durable.flush(timeout)

    def finish(self) -> None:
        """Mark the run finished with a last durable commit; returns when it is durable, on all ranks.

        Storage that fails is given several minutes to come back, many more than by `flush`. A later start of
        a finished run gets its last state from `resume`; loops over the remaining epochs then have none left.

        Raises:
            StateError: neither `resume` nor `sync` was called before.
            CheckpointError: it could not be made durable.
            RecoveryError: the same, on ranks other than 0.
        """
        self._refuse_early("state.finish()")
        runs.finish(self._session)

    # -- called by Horovod, or as Horovod's states have them ---------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after each rendezvous, before the ranks agree on a state.

        They are also called when a durable commit is resumed with another number of ranks.
        """
        self._session.reset_callbacks.extend(callbacks)

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take Horovod's report, on its own thread, that hosts have come (2) or gone (1)."""
        self._session.leaving.note(int(update_res))

    def on_reset(self) -> None:
        """Called by `run` after each rendezvous."""
        reset(self._session)

    def reset(self) -> None:
        """Called before the reset callbacks; for subclasses, there is nothing to do here."""

    # -- inside ----------------------------------------------------------------------------------------

    def _has_hooks(self) -> bool:
        """Return whether code of the script is called between a fault and the next agreement."""
        methods = [getattr(self, name) for name in ("save", "restore", "on_reset")]
        return bool(self._session.reset_callbacks) or not all(map(_is_ours, methods))

    def _refuse_early(self, call: str) -> None:
        if not self._session.context.place.joined:
            remedy = "call state.resume() first, or train in a function decorated by run"
            raise StateError(call, f"the ranks have not agreed on a state yet; {remedy}")

    def _not_durable(self) -> str | None:
        """Return a line on what durable commits lack, if a subclass keeps something by itself."""
        return _kept_elsewhere(type(self)) if self._session.durable.wanted else None

    def _make_way(self) -> None:
        """Let tracked attributes shadow properties of ours with the same name."""
        kind, names = type(self), _yielding(type(self)) & self._contents.values.keys()
        if names:
            found = {name: property(functools.partial(_tracked, name=name)) for name in names}
            self.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **found})

    if not TYPE_CHECKING:  # else mypy would take each name for an attribute, also a private one of ours

        def __getattr__(self, name: str) -> Any:
            # Only called for names that are not found otherwise, so tracked attributes live in one place.
            contents = self.__dict__.get("_contents")
            if contents is not None and name in contents.values:
                return contents.values[name]
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents.values:
            contents.put(name, value)
        elif name in self.__dict__.get("_taken", ()):
            raise ConfigError(f"state.{name}", "the state has this name for itself; choose another")
        else:
            object.__setattr__(self, name, value)

    def _around(self, verb: Literal["save", "restore", "sync"], ours: Callable[[], object]) -> None:
        """Call a method that a subclass may have its own of; ``super()`` in there does ``ours``, but once.

        If a subclass does not call ``super()``, ours follows its own.
        """
        if getattr(type(self), verb) is getattr(State, verb):
            ours()
            return
        self._due[verb] = ours
        try:
            getattr(self, verb)()
            self._due.pop(verb, _nothing)()
        finally:
            self._due.pop(verb, None)


def _tracked(state: State, name: str) -> Any:
    return state._contents.values[name]


def _divide(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide the arguments of a script into our keywords and its attributes.

    An attribute may have the name of a keyword, if its value is not one for the keyword.
    """
    settings: dict[str, Any] = dict.fromkeys(_TAKES)
    attributes: dict[str, Any] = {}
    for name, value in given.items():
        is_setting = name in _TAKES and (value is None or isinstance(value, _TAKES[name]))
        (settings if is_setting else attributes)[name] = value
    return settings, attributes


def _is_ours(thing: Any) -> bool:
    """Return whether a class or a method is of this package."""
    return str(thing.__module__).startswith("hvdrecover.")


def _yielding(kind: type) -> set[str]:
    """Return the public names of a class of states that make way for an attribute, as in Horovod's states.

    They are ours that Horovod's states have not, and the script's own, such as a default; not a property,
    which an attribute can't take the place of.
    """
    found = ((name, value) for base in kind.__mro__ for name, value in vars(base).items())
    public = {name for name, value in found if not name.startswith("_") and not hasattr(value, "__set__")}
    return public - HOROVODS


def _refuse_private(kind: type) -> None:
    """Refuse a script's class that defines a private name of `State` again.

    Raises:
        ConfigError: it does.
    """
    private = {name for name in vars(State) if name.startswith("_") and not name.endswith("__")}
    for base in kind.__mro__:
        if not _is_ours(base) and (both := private & vars(base).keys()):
            raise ConfigError(
                f"{base.__name__}.{min(both)}", "a state has this name for itself; choose another"
            )


def _kept_elsewhere(kind: type) -> str | None:
    """Return a line on what durable commits of a class lack, if it keeps something by itself."""
    own = [f"{verb}()" for verb in ("save", "restore") if not _is_ours(getattr(kind, verb))]
    if not own:
        return None
    return (
        f"{kind.__name__} has its own {' and '.join(own)}: what it keeps there by itself is not "
        "part of durable commits; pass that to the state's constructor by name"
    )


def _nothing() -> None:
    pass
