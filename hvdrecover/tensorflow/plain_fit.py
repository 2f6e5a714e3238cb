"""``model.fit`` of a plain Horovod script: it resumes after faults, with no line of the script changed.

In a job of `hvdrecover run`, `install` puts `_fit` into the place of Keras's ``fit``. One call does this:

1. Decide whether it can be resumed; all ranks decide alike. If not, say why, and call Keras's ``fit``.
2. Make a state of the model, its optimizer and the place in the data. Each ``fit`` of a script is a run by
   itself: the first at the checkpoint root, the second at ``ROOT/fit-2``, and so on.
3. `run` calls Keras's ``fit``, again after each fault. The last commit has the history; it ends the run.
4. A job that is started again goes through the script from its beginning. A ``fit`` that was finished loads
   its last commit, and returns its history at once.
5. A process that replaces a lost one does so, too, but the other ranks may be in a later ``fit``, and without
   a checkpoint root only they have the last commits of the earlier ones. So before the ranks agree on a
   state, they tell each other in which ``fit`` they are (`_State.meet`). For a rank that is behind, the
   others load the last commit of its ``fit`` again, and send it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
from keras.src import tree
from keras.src.backend import compute_output_spec
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from hvdrecover import config, heartbeat
from hvdrecover.config import Config
from hvdrecover.errors import ConfigError, EarlyCollectiveError, RecoveryError
from hvdrecover.events import show_on_terminal
from hvdrecover.state import commit as commits
from hvdrecover.state import random, startup
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.state.horovod import fault_of
from hvdrecover.state.liveness import paused
from hvdrecover.state.random import Randomness
from hvdrecover.state.run import run
from hvdrecover.tensorflow.callback_state import forgetful, history_text, set_history
from hvdrecover.tensorflow.collectives import TensorFlowWorld
from hvdrecover.tensorflow.dataset import PerRank
from hvdrecover.tensorflow.fit import Commit, Logs, Progress
from hvdrecover.tensorflow.fit_data import Resumable, resumable
from hvdrecover.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback
from hvdrecover.tensorflow.optimizer import is_distributed
from hvdrecover.tensorflow.state import TensorFlowKerasState
from hvdrecover.tensorflow.variables import build_optimizer, is_seed, raw

logger = logging.getLogger(__name__)

_MOST = 8  # fits of a script that are resumed: for processes that start, each keeps its last commit in memory
_MOST_BATCHES = 25  # between two commits; there are at least four in an epoch
_LARGEST = 1 << 24  # bytes of a rank's own statistics; each commit sends them to all ranks

_keras_fit = keras.Model.fit
_signature = inspect.signature(_keras_fit)
_fits: list[_State | None] = []  # those that have ended; None for one that was not resumed
_said: set[str] = set()
_is_within = False  # whether a fit is under way: a callback may call another one


def install(settings: Config) -> None:
    """Have ``fit`` of all Keras models resume after faults, in a job that has them repaired."""
    if settings.elastic or settings.checkpoint:
        keras.Model.fit = _fit


@functools.wraps(_keras_fit)
def _fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    given = _signature.bind(model, *args, **kwargs)
    given.apply_defaults()
    options = dict(given.arguments)
    options.pop("self")
    if not _concerns(model, options):
        return _keras_fit(model, *args, **kwargs)
    return _resume(model, options) or _keras_fit(model, *args, **kwargs)


def _concerns(model: keras.Model, options: dict[str, Any]) -> bool:
    """Return whether a ``fit`` is one of Horovod's that nothing else resumes; all ranks find the same."""
    if not hvd.is_initialized() or _is_within or hvd.size() == 1:
        return False
    if TensorFlowWorld.past.functions != len(_fits):
        return False  # the script has its own state and training function
    broadcasts = any(isinstance(each, BroadcastGlobalVariablesCallback) for each in _callbacks(options))
    if not broadcasts and not is_distributed(getattr(model, "optimizer", None)):
        _say(
            "model.fit: not resumed after a fault: its optimizer is no hvd.DistributedOptimizer, and no "
            "BroadcastGlobalVariablesCallback is among its callbacks"
        )
        return False
    # Elastic scripts have a fit of one batch make the optimizer's variables, before they make their state.
    is_single = options["steps_per_epoch"] == 1 and options["epochs"] - options["initial_epoch"] == 1
    return broadcasts or not is_single


def _callbacks(options: dict[str, Any]) -> list[Any]:
    return tree.flatten(options["callbacks"]) if options["callbacks"] is not None else []


def _say(line: str, level: int = logging.WARNING) -> None:
    show_on_terminal(config.read())
    if hvd.rank() == 0 and not _joins() and line not in _said:
        logger.log(level, "%s", line)
    _said.add(line)


def _joins() -> bool:
    """Return whether this process joins ranks that are in their training functions."""
    now = config.read()  # a standby has read its settings before it took the place of a lost process
    return now.rejoins and not now.untrained


# -- one fit -------------------------------------------------------------------------------------------------


def _resume(model: keras.Model, options: dict[str, Any]) -> keras.callbacks.History | None:
    """Do a ``fit`` that resumes, and return its history; None if it does not."""
    global _is_within
    number, reason = len(_fits) + 1, ""
    startup.training_begins()
    try:
        state = _State(model, number, options)
    except Exception as error:
        reason = str(error).removeprefix("model.fit: ").partition("\n")[0] or type(error).__name__
    try:
        rows = _meet(TensorFlowWorld(), number, reason) if reason else state.meet()
        reason = next((objection for _, objection in rows if objection), "")
    except Exception as error:
        is_repaired = heartbeat.page.in_run or _joins()
        if reason or not is_repaired or fault_of(error, TensorFlowWorld()) != "peers":
            raise  # before the first fit, all ranks start again together
        # The first collective of `run` fails as well. It has the ranks meet again.
    if reason and max(place for place, _ in rows) > number:
        raise EarlyCollectiveError("model.fit")
    if reason:
        _fits.append(None)
        TensorFlowWorld.past.functions = number
        _say(f"model.fit: not resumed after a fault: {reason}")
        return None
    lack = "" if state._session.durable.wanted else "; without --checkpoint URL, commits are in memory only"
    _say(f"model.fit resumes after faults; with --no-fit, it is Keras's{lack}", logging.INFO)
    if state.data.costs:
        _say(f"model.fit: {state.data.costs}")
    if forgotten := forgetful(_callbacks(options)):
        _say(
            f"model.fit: a fault does not restore the attributes of these callbacks: {', '.join(forgotten)}. "
            "Give them state_dict() and load_state_dict()"
        )
    TensorFlowWorld.past.functions = number - 1
    _is_within = True
    try:
        run(_train)(state, options)
    finally:
        _is_within = False
    _fits.append(state)
    if state.is_behind:  # the other ranks wait in a later fit: they answer no collective before it
        startup.watch_early_collectives(hvd, config.read())
    return state.end()


def _train(state: _State, options: dict[str, Any]) -> None:
    if options.get("epochs", 0) <= state.epochs:  # finished; with --reopen, it may have more epochs now
        return
    if state.ranks != hvd.size():
        _say(f"model.fit: {hvd.size()} ranks instead of {state.ranks}: epoch {state.epoch} begins again")
        state.ranks, state.batch = hvd.size(), 0
    if not state.last_commit.commit:  # all ranks have rank 0's
        state.own.value.load_state_dict(state.at_first)
    progress = _Progress(state)
    callbacks = [*_callbacks(options), progress, Commit(progress, [progress])]
    given = {**options, "x": state.data, "initial_epoch": state.epoch, "callbacks": callbacks}
    if state.data.num_batches is not None:  # with steps, Keras would begin an epoch before `go_to`
        given["steps_per_epoch"] = None
    history = _keras_fit(state.model, **given)
    state.history, state.epochs = history_text(history), options["epochs"]
    state.commit()


class _Progress(Progress):
    """Follows a ``fit`` whose data are each rank's own."""

    is_per_rank = True

    def __init__(self, state: _State) -> None:
        often = max(1, min(_MOST_BATCHES, (state.data.steps or _MOST_BATCHES) // 4))
        super().__init__(state, often if state.data.is_counted else None)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        is_first, state = self._is_first, self.state
        super().on_epoch_begin(epoch, logs)
        if is_first and state._fit.resumed is not None:
            commits.iteration_begins(state._session)  # what callbacks have drawn until now was drawn before
        state.data.go_to(epoch - state.begun, state.batch)

    def is_over(self) -> bool:
        steps = self.state.data.steps
        return steps is not None and self.state.batch >= steps


# -- the state -----------------------------------------------------------------------------------------------


class _State(TensorFlowKerasState):
    """The state of one ``fit``; making it raises an error that says why the ``fit`` cannot be resumed.

    Attributes:
        number: which ``fit`` of the script, from 1 on.
        is_behind: whether other ranks are in a later one.
        data: its data.
        begun: the epoch with which it began.
        ranks: the number of ranks.
        epochs: up to which epoch it was to train when it ended; -1 before.
        history: the text of its history, when it has ended.
        own: batch norm's statistics of this rank, and the like.
        at_first: those before the first batch.
    """

    _rng: Randomness = "store"

    def __init__(self, model: keras.Model, number: int, options: dict[str, Any]) -> None:
        if number > _MOST:
            raise ConfigError("model.fit", f"it is number {number} of the script, and {_MOST} are resumed")
        _refuse(options)
        self.number = number
        epochs = options["epochs"] - options["initial_epoch"]
        self.data: Resumable = resumable(options["x"], options, epochs, self._seed_of_rank, self._seeded)
        _build(model, self.data)
        others = _other_optimizers(model)
        for optimizer in others.values():
            build_optimizer(optimizer, model)
        root = config.read().checkpoint
        super().__init__(
            model,
            checkpoint=f"{root.rstrip('/')}/fit-{number}" if root and number > 1 else root,
            epoch=options["initial_epoch"],
            batch=0,
            begun=options["initial_epoch"],
            ranks=hvd.size(),
            epochs=-1,
            history=None,
            own=PerRank(_Statistics(model), lambda states, rank, size: states[rank % len(states)]),
            **others,
        )
        self.at_first = self.own.value.state_dict()

    def on_reset(self) -> None:
        super().on_reset()
        if hvd.size() != self.ranks:
            raise RecoveryError(
                f"model.fit: the job has {hvd.size()} ranks instead of {self.ranks}, and the script has split"
                " its data among those. All ranks start the script again"
            )
        self.meet()

    def meet(self) -> list[list[Any]]:
        """Wait until no rank is in an earlier ``fit``; return the number and the objection of each rank's."""
        while True:
            rows = _meet(self._world, self.number, "")
            first = min(number for number, _ in rows)
            self.is_behind = max(number for number, _ in rows) > self.number
            if first >= self.number:
                return rows
            earlier = _fits[first - 1]
            if earlier is None:
                continue  # its rank refuses it, and ends the job
            earlier.restore()
            self._world.past.functions = first - 1
            run(_train)(earlier, {})
            self._world.past.functions = self.number
            heartbeat.enter(heartbeat.Phase.RECOVERING)
            self.restore()

    def end(self) -> keras.callbacks.History:
        """Return the history, and leave the data as they are after all epochs, for the next ``fit``."""
        if self.epoch > self.begun:
            self.data.go_to(self.epoch - 1 - self.begun, 0)
        history = keras.callbacks.History()
        history.set_model(self.model)
        set_history(history, self.history)
        self.model.history = history
        return history

    def _seed_of_rank(self) -> int:
        return random.stream(self._session.own.seed, "data", hvd.rank())("order")

    def _seeded(self, number: int, function: Callable[[], None]) -> None:
        before = self._framework.generators()
        # Alike on all ranks: each may shuffle the samples of all, and take its part.
        self._framework.seed(random.stream(self._session.own.seed, f"epoch {number}", 0))
        function()
        self._framework.set_generators(before)


def _meet(world: World, number: int, objection: str) -> list[list[Any]]:
    with paused():  # the script may do something long between two fits
        return gather_json(world, [number, objection], "hvdrecover.fits")


def _refuse(options: dict[str, Any]) -> None:
    """Refuse what cannot be resumed; split off the samples for the validation, as Keras would."""
    callbacks = options["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ConfigError("callbacks", "a CallbackList can't be added to; pass a list")
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in _callbacks(options)):
        raise ConfigError("callbacks", "BackupAndRestore resumes by itself; leave it out")
    if options["validation_split"] and options["validation_data"] is None:
        arrays = (options["x"], options["y"], options["sample_weight"])
        split = array_slicing.train_validation_split(arrays, validation_split=options["validation_split"])
        (options["x"], options["y"], options["sample_weight"]), options["validation_data"] = split


def _build(model: keras.Model, data: Resumable) -> None:
    """Make the variables of a model that has none yet, as Keras does with the first batch."""
    if not all(layer.built for layer in model._flatten_layers()):
        inputs, *_ = data_adapter_utils.unpack_x_y_sample_weight(data.get_tf_dataset().element_spec)
        symbolic = tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), inputs)
        compute_output_spec(model, symbolic, training=False)


def _other_optimizers(model: keras.Model) -> dict[str, Any]:
    """Return the optimizers of a model's own training step, such as a GAN's, without ``model.optimizer``."""
    models = [each for each in model._flatten_layers() if isinstance(each, keras.Model)]
    values = [value for each in models for value in vars(each).values()]
    values += [part for value in values if isinstance(value, dict) for part in value.values()]
    values += [part for value in values if isinstance(value, list | tuple) for part in value]
    main = getattr(model, "optimizer", None)
    found = [each for each in values if isinstance(each, keras.optimizers.Optimizer) and each is not main]
    return {f"optimizer_{number}": each for number, each in enumerate(dict.fromkeys(found), 2)}


class _Statistics:
    """The variables of a model that each rank computes by itself, such as batch norm's statistics."""

    def __init__(self, model: keras.Model) -> None:
        own = [each for layer in model._flatten_layers() for each in layer._non_trainable_variables]
        self._variables = [raw(each) for each in own if not is_seed(each)]
        if sum(each.numpy().nbytes for each in self._variables) > _LARGEST:
            self._variables = []

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.numpy().copy() for number, each in enumerate(self._variables)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, each in enumerate(self._variables):
            each.assign(state[str(number)])
