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
from collections.abc import Callable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src import tree
from keras.src.backend import compute_output_spec
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils, get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter
from tensorflow.python.data.ops.dataset_ops import UnaryUnchangedStructureDataset

from hvdrecover import config, heartbeat
from hvdrecover.config import Config
from hvdrecover.data.order import Indices, permutation
from hvdrecover.errors import ConfigError, EarlyCollectiveError, RecoveryError
from hvdrecover.events import show_on_terminal
from hvdrecover.state import commit as commits
from hvdrecover.state import horovod
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.state.horovod import fault_of, paused
from hvdrecover.state.rank_local import Randomness, stream
from hvdrecover.state.run import run
from hvdrecover.tensorflow.collectives import TensorFlowWorld
from hvdrecover.tensorflow.dataset import PerRank, untuned
from hvdrecover.tensorflow.fit import Commit, Logs, Progress, forgetful, history_text, set_history
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
_is_within = False  # whether a fit is under way: a callback may call another one


def install(settings: Config) -> None:
    if settings.elastic or settings.checkpoint:
        keras.Model.fit = _fit


@functools.wraps(_keras_fit)
def _fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    given = _signature.bind(model, *args, **kwargs)
    given.apply_defaults()
    options = {name: value for name, value in given.arguments.items() if name != "self"}
    history = _resume(model, options) if _concerns(model, options) else None
    return history or _keras_fit(model, *args, **kwargs)


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


@functools.cache  # once in a script
def _say(line: str, level: int = logging.WARNING) -> None:
    show_on_terminal(config.read())
    if hvd.rank() == 0 and not _joins():
        logger.log(level, "%s", line)


def _joins() -> bool:
    """Return whether this process joins ranks that are in their training functions."""
    now = config.read()  # a standby has read its settings before it took the place of a lost process
    return now.rejoins and not now.untrained


def _resume(model: keras.Model, options: dict[str, Any]) -> keras.callbacks.History | None:
    """Do a ``fit`` that resumes, and return its history; None if it cannot be resumed."""
    global _is_within
    number, reason = len(_fits) + 1, ""
    horovod.training_begins()
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
        horovod.watch_early_collectives(hvd, config.read())
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


class _State(TensorFlowKerasState):
    """The state of one ``fit``; making it raises an error that says why the ``fit`` cannot be resumed."""

    _rng: Randomness = "store"

    def __init__(self, model: keras.Model, number: int, options: dict[str, Any]) -> None:
        if number > _MOST:
            raise ConfigError("model.fit", f"it is number {number} of the script, and {_MOST} are resumed")
        _refuse(options)
        self.number = number  # from 1 on, in the order of the script
        self.data: Resumable = resumable(options, self._seed_of_rank, self._seeded)
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
            epochs=-1,  # when it has ended: up to which epoch it was to train
            history=None,  # when it has ended: the text of its history
            own=PerRank(_Statistics(model), lambda states, rank, size: states[rank % len(states)]),
            **others,
        )
        self.at_first = self.own.value.state_dict()  # before the first batch

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
            self.is_behind = max(number for number, _ in rows) > self.number  # others are in a later fit
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
        return stream(self._session.own.seed, "data", hvd.rank())("order")

    def _seeded(self, number: int, function: Callable[[], None]) -> None:
        before = self._framework.generators()
        # Alike on all ranks: each may shuffle the samples of all, and take its part.
        self._framework.seed(stream(self._session.own.seed, f"epoch {number}", 0))
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


# -- the data -----------------------------------------------------------------------------------------------

# Keras's own adapters, with iterations that begin at a place of the fit: an epoch, and a number of batches
# that are done. Each rank has its own data, so each goes to the place in its own order. Arrays, and the
# batches of a `PyDataset`, are shuffled by a seed and the epoch: any process can go anywhere.


# Seeds the global random generators by a number, and calls what a `PyDataset` does between two epochs.
_Seeded = Callable[[int, Callable[[], None]], None]


def resumable(options: dict[str, Any], seed: Callable[[], int], seeded: _Seeded) -> Resumable:
    """Return the data of a ``fit`` with these arguments in a form that can begin at any place."""
    names = ("y", "sample_weight", "batch_size", "steps_per_epoch", "class_weight")
    given, steps = {name: options[name] for name in names}, options["steps_per_epoch"]
    if isinstance(x := options["x"], tf.data.Dataset):
        return _Pipeline(get_data_adapter(x, **given)._dataset, options)
    if can_convert_arrays((x, options["y"], options["sample_weight"])):
        return _Arrays(get_data_adapter(x, **given), options, seed)
    if not isinstance(x, PyDataset) or x.num_batches is None:
        raise ConfigError(
            "model.fit",
            f"a {type(x).__name__} as data has no place to which a restarted process could go; pass arrays, "
            "a keras.utils.PyDataset of known length or a tf.data.Dataset",
        )
    if steps not in (None, x.num_batches):
        problem = f"it is {steps}, and the data have {x.num_batches} batches; leave it out"
        raise ConfigError("steps_per_epoch", problem)
    return _Batches(x, options, seed, seeded)


class Resumable(DataAdapter):  # type: ignore[misc]
    """Data whose next iteration begins at a place; Keras takes it as it is."""

    steps: int | None  # of an epoch; None for an endless one
    is_counted = True  # whether an iteration can begin inside an epoch, or at the ends of epochs only
    costs = ""  # the cost of a resumption, in words
    num_batches: int | None = None  # until Keras makes another iterator; None if Keras makes no other one
    batch_size = has_partial_batch = partial_batch_size = None

    def go_to(self, epoch: int, batch: int) -> None:
        """Have the next iteration begin at a batch of an epoch, counted from the first epoch of this fit."""

    def get_tf_dataset(self) -> tf.data.Dataset:
        raise NotImplementedError


class _Arrays(Resumable):
    """Arrays. With ``steps_per_epoch``, epochs follow each other in the passes over the samples."""

    def __init__(self, arrays: ArrayDataAdapter, options: dict[str, Any], seed: Callable[[], int]) -> None:
        self._arrays, self._shuffle, self._seed = arrays, options["shuffle"], seed
        self._pass = self._first = 0
        steps = options["steps_per_epoch"]
        self.num_batches = None if steps else arrays.num_batches
        self.steps: int = steps or arrays.num_batches

    def go_to(self, epoch: int, batch: int) -> None:
        self._pass, self._first = divmod(epoch * self.steps + batch, self._arrays.num_batches)

    def _indices(self) -> Iterator[Indices]:
        size, samples = self._arrays.batch_size, self._arrays._num_samples
        number, first = self._pass, self._first
        while True:
            order = _order(samples, self._seed(), number, self._shuffle)
            for start in range(first * size, samples, size):
                yield order[start : start + size]
            if self.num_batches is not None:
                return
            number, first = number + 1, 0

    def get_tf_dataset(self) -> tf.data.Dataset:
        length = None if self._arrays.has_partial_batch else self._arrays.batch_size
        spec = tf.TensorSpec([length], tf.int64)
        indices = tf.data.Dataset.from_generator(self._indices, output_signature=spec)
        arrays = array_slicing.convert_to_sliceable(self._arrays._inputs, target_backend="tensorflow")
        inputs = tf.data.Dataset.from_tensors(tree.lists_to_tuples(arrays)).repeat()
        batches = tf.data.Dataset.zip((indices, inputs)).map(_taken, tf.data.AUTOTUNE)
        return untuned(batches.prefetch(tf.data.AUTOTUNE))


def _order(length: int, seed: int, number: int, shuffle: Any) -> Indices:
    return permutation(length, seed, number) if shuffle else np.arange(length, dtype=np.int64)


def _taken(indices: tf.Tensor, arrays: Any) -> Any:
    def take(part: Any) -> Any:
        if isinstance(part, array_slicing.TensorflowSparseWrapper):
            return array_slicing.slice_tensorflow_sparse_wrapper(part, indices)
        return tf.gather(part, indices) if tf.is_tensor(part) else None

    return tree.traverse(take, arrays)


class _Pipeline(Resumable):
    """A ``tf.data`` pipeline, read from its beginning. With steps, one iteration covers all epochs."""

    costs = (
        "after a fault, its tf.data pipeline begins again, and what comes before the place is read and "
        "thrown away. Write shuffle(..., seed=0, reshuffle_each_iteration=False): in another order, samples "
        "of one epoch may come twice or not at all"
    )

    def __init__(self, dataset: tf.data.Dataset, options: dict[str, Any]) -> None:
        length, steps = int(dataset.cardinality()), options["steps_per_epoch"]
        epochs = options["epochs"] - options["initial_epoch"]
        if steps is not None and 0 <= length < steps * epochs:
            raise ConfigError(
                "steps_per_epoch",
                f"{epochs} epochs of {steps} batches are more than the {length} batches of the data set, so "
                "Keras cuts epochs short; add .repeat() to it, or leave steps_per_epoch out",
            )
        self._steps, self._data = steps, _Skipping(dataset)
        self.steps = steps or (length if length >= 0 else None)
        self.num_batches = self.steps if steps is None else None
        if steps is None and length == tf.data.UNKNOWN_CARDINALITY:
            self.is_counted = False
            self.costs = "after a fault, its epoch begins again, as its tf.data pipeline has no known length"

    def go_to(self, epoch: int, batch: int) -> None:
        self._data.first = batch if self._steps is None else epoch * self._steps + batch

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self._data


class _Skipping(UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """A data set whose iterations begin at batch ``first``."""

    def __init__(self, dataset: tf.data.Dataset) -> None:
        super().__init__(dataset, dataset._variant_tensor)
        self.first = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._input_dataset.skip(self.first) if self.first else self._input_dataset)


class _Batches(Resumable):
    def __init__(
        self, dataset: PyDataset, options: dict[str, Any], seed: Callable[[], int], seeded: _Seeded
    ) -> None:
        self._dataset, self._options, self._seed, self._seeded = dataset, options, seed, seeded
        self._begun = 0  # how many epochs the data set has begun
        self._adapter = PyDatasetAdapter(dataset, options["class_weight"])
        self._spec = self._adapter.get_tf_dataset().element_spec
        self.steps = self.num_batches = dataset.num_batches

    def go_to(self, epoch: int, batch: int) -> None:
        """Have the data set begin all epochs up to this one, as it may shuffle its samples in each."""
        self.on_epoch_end()
        while self._begun <= epoch:
            self._seeded(self._begun, self._begin)
            self._begun += 1
        order = _order(self._dataset.num_batches, self._seed(), epoch, self._options["shuffle"])
        # A new adapter: the last one may have fetched batches for an iteration that a fault has ended.
        self._adapter = PyDatasetAdapter(_Rest(self._dataset, order[batch:]), self._options["class_weight"])

    def _begin(self) -> None:
        self._dataset.on_epoch_end()  # Keras calls it also before the first epoch
        self._dataset.on_epoch_begin()

    def get_tf_dataset(self) -> tf.data.Dataset:
        data = tf.data.Dataset.from_generator(
            lambda: self._adapter._get_iterator(), output_signature=self._spec
        )
        has_workers = self._adapter.enqueuer is not None  # they fetch ahead
        return untuned(data if has_workers else data.prefetch(tf.data.AUTOTUNE))

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Keras does not call this for an epoch that ends early."""
        if self._adapter._within_epoch:
            self._adapter.on_epoch_end()


class _Rest(PyDataset):  # type: ignore[misc]
    def __init__(self, dataset: PyDataset, order: Indices) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._order = dataset, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[int(self._order[index])]
