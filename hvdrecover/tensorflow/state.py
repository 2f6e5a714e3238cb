"""The states of TensorFlow training jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.randomness import Randomness
from hvdrecover.elastic.recovery import Source
from hvdrecover.elastic.scalars.scalars import Scalars
from hvdrecover.elastic.state import State
from hvdrecover.tensorflow import bad_steps, check_numerics, faults, witness
from hvdrecover.tensorflow.building import build_optimizer, refuse_unbuilt
from hvdrecover.tensorflow.dataset import ElasticDataset
from hvdrecover.tensorflow.framework import TensorFlowFramework
from hvdrecover.tensorflow.kept_callbacks import NAME, KeptCallbacks
from hvdrecover.tensorflow.sent import sent
from hvdrecover.tensorflow.steps import Steps
from hvdrecover.tensorflow.variables import Variable
from hvdrecover.tensorflow.world import TensorFlowWorld


class TensorFlowState(State):
    """A `State` of variables and plain objects.

    Args:
        variables: ``tf.Variable`` and Keras variables, or None.
        checkpoint: a `Checkpoint` or its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that nothing
            is written.
        rng: ``"reseed"`` or ``"store"``; see `hvdrecover.elastic.randomness`.
        guard: what is watched about the ranks, such as ``Guard()``; None watches nothing.
        tensorboard: path or URL of a folder for TensorBoard's runs, one for each rank; None writes none. Make
            the state before functions are traced.
        attributes: models, optimizers, data sets made by `elastic_dataset` and anything else to track, by
            name.

    Raises:
        ConfigError: a setting has no usable value, an attribute's name is taken, or a model or an optimizer
            has not been built.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.
    """

    def __init__(
        self,
        variables: Sequence[Variable] | None = None,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness = "reseed",
        guard: Guard | None = None,
        tensorboard: str | None = None,
        **attributes: Any,
    ) -> None:
        if variables is not None:
            attributes = {"variables": list(variables), **attributes}
        for name, value in attributes.items():
            refuse_unbuilt(f"state.{name}", value)
        super().__init__(
            TensorFlowFramework(),
            TensorFlowWorld(),
            checkpoint=checkpoint,
            rng=rng,
            guard=guard,
            tensorboard=tensorboard,
            attributes=attributes,
        )
        self._callbacks = KeptCallbacks()
        self._contents.keep(NAME, self._callbacks)
        self._steps: Steps | None = None
        if isinstance(self._scalars, Scalars):
            self._steps = Steps(self._scalars)
            for each in attributes.values():
                if isinstance(each, ElasticDataset):
                    each.watch(self._steps)
        if self._watch.judge is not None:
            bad_steps.watch(self._contents.components(), self._watch.judge, self._batch_size)
        if self._witness is not None:
            witness.watch(self._contents, self._witness)

    def verdict_on(self, error: BaseException) -> BaseException:
        """What an error that ended the training function was before TensorFlow has made it another."""
        if (passed := faults.original(error)) is not None:
            return passed
        verdict, judge = super().verdict_on(error), self._watch.judge
        if verdict is error and judge is not None:
            alone = self._world.size() == 1
            return check_numerics.verdict_on(error, judge, self._batch_size, alone=alone)
        return verdict

    def agree(self, reached: tuple[int, int] = (0, 0)) -> Source:
        """As of any state."""
        source = super().agree(reached)
        sent.forget()
        return source

    def _batch_size(self) -> int:
        """Samples in this rank's batch; 0 if unknown."""
        order = self._contents.order_in_use()
        tracked = self._contents.values.values()
        sizes = [
            each.batch_size for each in tracked if isinstance(each, ElasticDataset) and each.order is order
        ]
        return sizes[0] if sizes else 0


class TensorFlowKerasState(TensorFlowState):
    """A `State` of a Keras model and its optimizer.

    Args:
        model: a model that has been built.
        optimizer: its optimizer; None takes the one that the model was compiled with, if any. One that has no
            slots yet gets them here, so that there is something for a commit to be loaded into.
        checkpoint: see `TensorFlowState`.
        rng: see `TensorFlowState`.
        guard: see `TensorFlowState`.
        tensorboard: see `TensorFlowState`.
        attributes: see `TensorFlowState`.

    Raises:
        ConfigError: as for `TensorFlowState`.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness = "reseed",
        guard: Guard | None = None,
        tensorboard: str | None = None,
        **attributes: Any,
    ) -> None:
        refuse_unbuilt("state.model", model)
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        build_optimizer(optimizer, model)
        super().__init__(
            checkpoint=checkpoint,
            rng=rng,
            guard=guard,
            tensorboard=tensorboard,
            model=model,
            optimizer=optimizer,
            **attributes,
        )
