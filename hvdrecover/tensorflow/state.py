"""The states of TensorFlow training jobs, and commits outside of a job: `load` and `to_keras`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as hvd
import keras

from hvdrecover.checkpoint import Checkpoint, CommitId
from hvdrecover.checkpoint.inspection import written_aside
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import ConfigError, ExportError, MismatchError
from hvdrecover.guard import Guard
from hvdrecover.scalars import Tracker
from hvdrecover.state import contents
from hvdrecover.state.contents import Loaded
from hvdrecover.state.rank_local import Randomness
from hvdrecover.state.state import State
from hvdrecover.tensorflow import virtual
from hvdrecover.tensorflow.collectives import TensorFlowWorld
from hvdrecover.tensorflow.dataset import ElasticDataset
from hvdrecover.tensorflow.fit import NAME, FitState
from hvdrecover.tensorflow.framework import TensorFlowFramework
from hvdrecover.tensorflow.variables import Variable, build_optimizer, refuse_unbuilt
from hvdrecover.tensorflow.virtual import Step
from hvdrecover.virtual.ranks import Policy, virtual_of
from hvdrecover.virtual.steps import steps


class TensorFlowState(State):
    """A `State` of variables and plain objects.

    Args:
        variables: ``tf.Variable`` and Keras variables, or None.
        checkpoint: a `Checkpoint` or its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that nothing
            is written.
        rng: ``"reseed"``, the default, or ``"store"``; see `hvdrecover.state.rank_local`.
        guard: what is watched about the ranks, such as ``Guard()``; None watches nothing.
        tensorboard: path or URL of a folder for TensorBoard's runs, one for each rank. With it or a tracker,
            make the state before functions are traced.
        tracker: an experiment tracker, such as ``WandB()`` or ``MLflow()``.
        virtual_ranks: number of virtual ranks, whose work any number of processes carry out with one and the
            same result; None has none. Train by `steps`.
        shares: how they are dealt out: ``"equal"``, the default, or ``"by-speed"``.
        attributes: models, optimizers, data sets of `elastic_dataset` and anything else to track, by name.

    Raises:
        ConfigError: a setting or a name is invalid, or a model or an optimizer has not been built.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.

    Examples:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> state = recover.TensorFlowState([weights], epoch=0)
        >>> state.epoch += 1
        >>> state.restore()  # as after a fault
        >>> state.epoch
        0
    """

    def __init__(
        self,
        variables: Sequence[Variable] | None = None,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness | None = None,
        guard: Guard | None = None,
        tensorboard: str | None = None,
        tracker: Tracker | None = None,
        virtual_ranks: int | None = None,
        shares: Policy | None = None,
        **attributes: Any,
    ) -> None:
        if variables is not None:
            attributes = {"variables": list(variables), **attributes}
        for name, value in attributes.items():
            refuse_unbuilt(f"state.{name}", value)
        self._framework, self._world = TensorFlowFramework(), TensorFlowWorld()
        self._fit = FitState(self._world)
        ranks = None if virtual_ranks is None else virtual.virtual_ranks(attributes, virtual_ranks, shares)
        super().__init__(
            self._framework,
            self._world,
            checkpoint=checkpoint,
            rng=rng,
            guard=guard,
            tensorboard=tensorboard,
            tracker=tracker,
            hidden={NAME: self._fit},
            virtual=ranks,
            attributes=attributes,
        )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A tracked attribute."""

    def steps(
        self,
        data: Any,
        variables: Sequence[Variable] | None = None,
        *,
        op: Any = hvd.Average,
        compression: Any = hvd.Compression.none,
    ) -> Iterator[Step]:
        """Iterate over the remaining steps of a pass over the data, in each all virtual ranks::

            for step in state.steps(dataset):
                for images, labels in step:                 # one batch for each virtual rank of this process
                    step.add(gradients_of(images, labels))  # by a plain tf.GradientTape
                optimizer.apply(step.gradients(), model.trainable_variables)  # averaged over the job
                state.commit()

        Samples are counted as done; don't call ``record_batch``. A data set's ``set_epoch`` is the script's.

        Args:
            data: an `elastic_dataset` of this state, whose samples are dealt out to the virtual ranks; or a
                `PerRank` of this state, with an iterator for each of them.
            variables: the variables that the gradients belong to; None for all that ``state.model`` trains.
            op: ``hvd.Average`` or ``hvd.Sum``.
            compression: ``hvd.Compression.fp16`` adds up and sends float16.

        Raises:
            ConfigError: it is something else, or the state has no virtual ranks.
            StepError: a step was left before its end, or passed over.
        """
        context = self._session.context
        ranks = virtual_of(context.ranks)
        if variables is None:
            model = context.contents.values.get("model")
            if not isinstance(model, keras.layers.Layer):
                problem = "there is no state.model; pass what you train as variables="
                raise ConfigError("state.steps()", problem)
            variables = model.trainable_variables
        feed = virtual.feed(data, context.contents.values, context.framework)
        virtual.gradients_of(ranks).of(variables, op, compression)
        return steps(ranks, feed, Step)

    @property
    def _datasets(self) -> list[ElasticDataset]:
        attributes = self._session.context.contents.values.values()
        return [each for each in attributes if isinstance(each, ElasticDataset)]


class TensorFlowKerasState(TensorFlowState):
    """A `State` of a Keras model and its optimizer; raises the errors of `TensorFlowState`.

    Args:
        model: a model that has been built.
        optimizer: its optimizer; None takes the one that the model was compiled with, if any. One that has no
            slots yet gets them here, so that there is something for a commit to be loaded into.
        attributes: what else to track, by name; and the keywords of `TensorFlowState`.

    Examples:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile(recover.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> state = recover.TensorFlowKerasState(model, epoch=0, batch=0)
    """

    def __init__(
        self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **attributes: Any
    ) -> None:
        refuse_unbuilt("state.model", model)
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        build_optimizer(optimizer, model)
        super().__init__(model=model, optimizer=optimizer, **attributes)
        self._fit.compiled = getattr(model, "optimizer", None)


def load(
    url: str,
    *,
    model: Any = None,
    optimizer: Any = None,
    commit: str | int | CommitId | None = None,
    strict: bool = True,
    **attributes: Any,
) -> Loaded:
    """Load a commit into models and optimizers, outside of a job. Horovod need not be initialised.

    Only the files of these attributes are read, and every byte of them is verified. A job there continues.

    Args:
        url: the checkpoint root: a path or an fsspec URL.
        model: the model that was ``model`` in the state; it must have been built.
        optimizer: the optimizer that was ``optimizer`` in the state. One that has no slots yet gets those of
            the model that is handed in with it.
        commit: its name, such as ``"g0003-c00000120"``, or its number; None takes the newest that verifies.
        strict: whether everything must fit. If not, what fits is loaded, with a warning about the rest.
        attributes: more models, optimizers, lists of variables and so on, by their names in the state.

    Raises:
        ConfigError: nothing was handed in, or a model that has not been built, or the URL is invalid.
        CheckpointError: the commit is missing, damaged, of a newer format, or does not fit, or the storage
            failed. Nothing was loaded.

    Examples:
        >>> loaded = recover.load("s3://bucket/run-1", model=model)  # doctest: +SKIP
        >>> loaded.objects["epoch"]  # doctest: +SKIP
        12
    """
    refuse_unbuilt("model", model)
    build_optimizer(optimizer, model)
    given = {"model": model, "optimizer": optimizer, **attributes}
    for name, value in given.items():
        refuse_unbuilt(name, value)
    return contents.load(TensorFlowFramework(), url, given, commit, strict=strict)


def to_keras(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, model_config: Path, force: bool
) -> list[str]:
    """Write a commit's verified model to a ``.keras`` file, without its optimizer; return its attribute."""
    url = f"{storage.url}/{commit.name}"
    if len(only) > 1:
        raise ExportError(url, f"a .keras file holds one model; name one of {', '.join(only)} with --only")
    name = only[0] if only else "model"
    model = _make(model_config)  # the text of ``to_json()``, or a .keras file, whose weights are not used
    with written_aside(path, force=force) as aside:
        try:
            contents.load(TensorFlowFramework(), storage.url, {name: model}, commit, strict=True)
        except MismatchError as error:
            listing = "".join(f"\n  {line}" for line in error.differences)
            raise ExportError(
                url, f"the commit's '{name}' does not fit the model of {model_config}:{listing}"
            ) from error
        model.save(aside)
    return [name]


def _make(file: Path) -> keras.Model:
    """Make a model without running code of the file's; Keras refuses what would."""
    try:
        if file.suffix == ".keras":
            model = keras.models.load_model(file, compile=False, safe_mode=True)
        else:
            config = {**json.loads(file.read_text()), "compile_config": None}
            model = keras.models.model_from_json(json.dumps(config))
        if not isinstance(model, keras.Model) or not model.built:
            raise TypeError(f"it makes a {type(model).__name__}, and no model that has been built")
    except Exception as error:  # Keras raises all kinds
        reason = str(error).rpartition("Exception encountered: ")[2]  # after a page of the config
        raise ExportError(
            str(file),
            f"no model can be made of it ({textwrap.shorten(reason, 200)}). It has to hold what "
            "model.to_json() gives after model.build(input_shape), or be a .keras file. A model with classes "
            "or lambdas of your own is exported in Python, where they are known: "
            "hvdrecover.tensorflow.load(URL, model=model), then model.save(FILE)",
        ) from error
    return model
