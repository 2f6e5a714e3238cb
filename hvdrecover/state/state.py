"""The public class `State`: the script's view of the state of a job."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from hvdrecover import config as configs
from hvdrecover.checkpoint import Checkpoint, CommitId
from hvdrecover.errors import StateError
from hvdrecover.events import of_training
from hvdrecover.guard import Guard
from hvdrecover.machine import SYSTEM_CLOCK, Clock
from hvdrecover.scalars import Tracker, as_numbers
from hvdrecover.state import commit as commits
from hvdrecover.state import run as runs
from hvdrecover.state.adapter import Framework, HiddenAttribute, World
from hvdrecover.state.commit import Keywords, Session
from hvdrecover.state.contents import Contents
from hvdrecover.state.hooks import Context, Hook
from hvdrecover.state.horovod import paused
from hvdrecover.state.horovod import rank as horovod_rank
from hvdrecover.state.rank_local import Place, Randomness, Ranks
from hvdrecover.state.rendezvous import agree, reset

# The methods of Horovod's states; no attribute can have one of these names.
HOROVODS = {
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


_TAKES: dict[str, type | tuple[type, ...]] = {
    "checkpoint": (Checkpoint, str),
    "rng": str,
    "guard": Guard,
    "tensorboard": str,
    "tracker": Tracker,
}


class State:
    """Everything that a job must not lose.

    Attributes given by name become attributes of the state. Models, optimizers and other objects with
    ``state_dict`` and ``load_state_dict`` are tracked in place. Of elastic samplers, the cursor is stored.
    All other values are plain objects, which JSON must be able to hold (`hvdrecover.checkpoint.values`).

    Args:
        hidden: attributes that the adapter adds, by names that begin with an underscore.
        virtual: the virtual ranks; None if the job has none.
        attributes: the attributes to track, and perhaps settings of `Keywords`.
        keywords: settings of `Keywords`.

    Raises:
        ConfigError: a setting is invalid, or the state needs an attribute's name for itself.
        UnsupportedValueError: JSON cannot hold a plain object.
        UnsupportedTensorError: safetensors cannot hold a tensor.

    After a recovery, all ranks have the source rank's copy of every attribute. So a rank-local value, such as
    a running loss or batch norm's statistics, is replaced unless it is a `PerRank`; a `Guard` warns of this.

    An attribute may have the name of a method that this class adds to Horovod's states, and then hides it.
    It may also have the name of a keyword, if the keyword does not accept the value.

    A subclass may define `save`, `restore`, `sync` and `reset`. They are called when Horovod would call them,
    except that `restore` is called after the rendezvous; ``super()`` in them does the work of this class.
    Data that a subclass stores elsewhere is not part of a commit.
    """

    _rng: Randomness = "reseed"  # the treatment of random generators if the script does not choose one

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
        settings: Any = dict.fromkeys(_TAKES)
        tracked: dict[str, Any] = {}
        for name, value in {**attributes, **keywords}.items():
            is_setting = name in _TAKES and (value is None or isinstance(value, _TAKES[name]))
            (settings if is_setting else tracked)[name] = value
            if not is_setting:
                vars(self).pop(name, None)  # a subclass may have set it before it called this method
        self._due: dict[str, Callable[[], object]] = {}
        ranks = virtual or Ranks()
        self._contents = Contents(
            framework, tracked, HOROVODS, lambda: commits.iteration_begins(self._session), hidden, ranks
        )
        events = of_training(config, clock)
        events.rank = horovod_rank()
        self._session = Session(
            Context(framework, world, self._contents, config, events, clock, Place(world, ranks), ranks),
            settings,
            ranks.rng(settings["rng"], type(self)._rng),
            hooks,
            self._around,
        )
        self._session.memory.capture(CommitId(0, 0))
        if type(self).reset is not State.reset:
            self._session.reset_callbacks.append(self.reset)

        kind = type(self)
        if hides := tracked.keys() & set(dir(kind)):
            found = {name: property(functools.partial(_tracked, name)) for name in hides}
            self.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **found})

    # -- attributes ------------------------------------------------------------------------------------

    @property
    def last_commit(self) -> CommitId:
        """The newest commit in this rank's memory; generation 0 before the first `sync`."""
        return self._session.memory.last

    @property
    def last_durable(self) -> CommitId | None:
        """The newest commit that this rank has made durable; None on all ranks but 0."""
        return self._session.durable.last_durable

    @property
    def finished(self) -> bool:
        """Whether the run's training function has returned, in this start or an earlier one."""
        return self._session.memory.finished

    def log_metrics(self, loss: Any = None, **others: Any) -> None:
        """Report numbers of a step to TensorBoard and the tracker. Call it right after the step.

        Args:
            loss: this rank's loss, as a number or a tensor with one element; does not wait for the device.
            others: other numbers, by name.

        Raises:
            ConfigError: a value is not a number.
        """
        values = as_numbers(self._session.context.framework, {"loss": loss, **others})
        self._session.hooks.notify(Hook.observed, values)

    # -- commits ---------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Bring all ranks to the job's newest commit, or to rank 0's initial state if there is none.

        For a script that trains in a plain loop, not in a function decorated by `run`. When a rank is lost in
        a job of ``hvdrecover run``, all processes end, and the script starts again from its beginning. Then
        this method restores the newest commit from the hosts' memory, or from the checkpoint root. It
        restores a finished run, too; see `finished`. Call it once, on all ranks, when all attributes are set
        up.

        Raises:
            StateError: it was called before, or in a function decorated by `run`.
            ConfigError: the guard is set to roll back, which needs `run`; or another state has used the root.
            CheckpointError: the checkpoint root cannot be used.
            RecoveryError: ranks were lost meanwhile, or are at different points of the script.

        Examples:
            >>> state = recover.TorchState(epoch=0)
            >>> state.resume()
            >>> for state.epoch in range(state.epoch, 3):
            ...     state.commit()  # the job can go back to here
            >>> state.finish()
        """
        runs.resume(self)

    def commit(self, durable: bool = False) -> None:
        """Make a commit: a point to which the job can return. Then check whether hosts have come or gone.

        Args:
            durable: make this commit durable even if none is due. It is written in the background; `flush`
                waits for it. If an earlier commit is being written, this call waits for that attempt.

        Raises:
            HostsUpdatedInterrupt: hosts have come or gone; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            UnsupportedValueError: JSON cannot hold a plain object.
            CheckpointError: as in `check_host_updates`.
            DivergedError: the ranks' parameters differ, and the state's guard is to raise it.
            NumericsError: parameters are not finite, and the state's guard is to raise it.
        """
        if self._session.context.config.elastic:
            self._refuse_early("state.commit()")
        commits.commit(self._session, durable=durable)

    def save(self) -> None:
        """Make a commit in this rank's memory only. The other ranks take no part."""
        self._due.pop("save", lambda: commits.save_alone(self._session))()

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
        """Check whether hosts have come or gone, or the job must stop; all ranks get the same result.

        Raises:
            HostsUpdatedInterrupt: hosts have come or gone; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            FencedError: another job has taken the checkpoint root.
            DurableAgeError: a due commit has waited longer than ``HVDRECOVER_MAX_DURABLE_AGE`` allows.
            StoppedError: rank 0 had one of these errors; raised on the other ranks.
        """
        commits.check(self._session)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest commit is durable. Returns at once on ranks other than 0, which do not write.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.

        Raises:
            FlushTimeoutError: the commit is not durable in time; the write continues.
            StorageError: several attempts have failed; the writer continues to retry.
            FencedError: another job has taken the checkpoint root.
            NumericsError: the newest commit has parameters that are not finite, and the state has a guard.
        """
        with paused():
            self._session.durable.flush(timeout)

    def finish(self) -> None:
        """Mark the run finished with a last durable commit. Returns on all ranks when it is durable.

        If the storage fails, the write is retried for several minutes, much longer than by `flush`. A later
        start of a finished run gets its last state from `resume`, so no epochs remain in its loop.

        Raises:
            StateError: neither `resume` nor `sync` was called before.
            CheckpointError: the commit could not be made durable.
            RecoveryError: rank 0 could not make it durable; raised on the other ranks.
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
        """Called by Horovod on a background thread when hosts have come (2) or gone (1)."""
        self._session.leaving.hosts_changed.set()

    def on_reset(self) -> None:
        """Called by `run` after each rendezvous."""
        reset(self._session)

    def reset(self) -> None:
        """Called before the reset callbacks. Does nothing; a subclass may override it."""

    # -- inside ----------------------------------------------------------------------------------------

    def _has_hooks(self) -> bool:
        """Return whether the script's own code runs between a fault and the next agreement."""
        own = not all(_is_ours(getattr(self, name)) for name in ("save", "restore", "on_reset"))
        return own or bool(self._session.reset_callbacks)

    def _refuse_early(self, call: str) -> None:
        if not self._session.context.place.joined:
            remedy = "call state.resume() first, or train in a function decorated by run"
            raise StateError(call, f"the ranks have not agreed on a state yet; {remedy}")

    def _not_durable(self) -> str | None:
        """Return a warning if a subclass may store data that durable commits lack; else None."""
        own = [f"{verb}()" for verb in ("save", "restore") if not _is_ours(getattr(self, verb))]
        if not self._session.durable.wanted or not own:
            return None
        return (
            f"{type(self).__name__} has its own {' and '.join(own)}: what it keeps there by itself is not "
            "part of durable commits; pass that to the state's constructor by name"
        )

    if not TYPE_CHECKING:  # otherwise mypy would accept any name as an attribute, also a misspelt one

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
        else:
            object.__setattr__(self, name, value)

    def _around(self, verb: Literal["save", "restore", "sync"], ours: Callable[[], object]) -> None:
        """Call a method that a subclass may override; ``super()`` in the override runs ``ours``, once."""
        if getattr(type(self), verb) is getattr(State, verb):
            ours()
            return
        self._due[verb] = ours
        try:
            getattr(self, verb)()
            self._due.pop(verb, lambda: None)()  # if the override did not call ``super()``
        finally:
            self._due.pop(verb, None)


def _tracked(name: str, state: State) -> Any:
    return state._contents.values[name]


def _is_ours(method: Any) -> bool:
    return str(method.__module__).startswith("hvdrecover.")


# -- Horovod's classes of states, for scripts that have changed nothing but the import ---------------------


Broadcast = Callable[..., Any]


class ObjectState(State):
    """Horovod's ``ObjectState``: a state of plain objects, and of all else that the framework knows.

    Random generators are left alone: a script that was not written for us may draw the same numbers on all
    ranks from a global one. Subclasses find the arguments as ``self._bcast_object`` and ``self._rank``.
    """

    _rng: Randomness = "store"

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int], **attributes: Any) -> None:
        super().__init__(*self._parts(), attributes=attributes)
        self._bcast_object, self._rank = from_root(self, bcast_object), get_rank

    @staticmethod
    def _parts() -> tuple[Framework, World]:
        raise NotImplementedError


class HorovodState(State):
    """Horovod's ``State``, the base of states whose `save`, `restore` and `sync` do everything themselves.

    They are called where Horovod would call them, and ranks leave, join and restart as with any state. What
    they keep is in memory only: no commit becomes durable.
    """

    _rng: Randomness = "store"

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int]) -> None:
        config = configs.read()
        super().__init__(*self._parts(), config=dataclasses.replace(config, checkpoint=None), attributes={})
        self._url = config.checkpoint
        self._bcast_object, self._rank = from_root(self, bcast_object), get_rank

    @staticmethod
    def _parts() -> tuple[Framework, World]:
        raise NotImplementedError

    def _not_durable(self) -> str | None:
        return self._url and (
            f"{type(self).__name__} keeps its commits by itself, in memory: none becomes durable at "
            f"{self._url}; derive it from ObjectState, and pass what is to be kept to the constructor by name"
        )


def from_root(state: State, bcast_object: Broadcast) -> Broadcast:
    """Return a ``broadcast_object`` whose default root is the rank whose state all have taken."""
    if "root_rank" not in inspect.signature(bcast_object).parameters:
        return bcast_object

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2:
            kwargs.setdefault("root_rank", state._session.root)
        return bcast_object(*args, **kwargs)

    return broadcast
