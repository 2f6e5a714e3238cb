"""The states of TensorFlow training jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.commits.randomness import Randomness
from hvdrecover.elastic.companions import Companions
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.state import State
from hvdrecover.tensorflow.blank_gradients import ForgetSent
from hvdrecover.tensorflow.building import build_optimizer, refuse_unbuilt
from hvdrecover.tensorflow.dataset import ElasticDataset, datasets
from hvdrecover.tensorflow.framework import TensorFlowFramework
from hvdrecover.tensorflow.kept_callbacks import NAME, KeptCallbacks
from hvdrecover.tensorflow.variables import Variable
from hvdrecover.tensorflow.world import TensorFlowWorld


class TensorFlowState(State):
    """A `State` of variables and plain objects.

    Args:
        variables: ``tf.Variable`` and Keras variables, or None.
        checkpoint: a `Checkpoint` or its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that nothing
            is written.
        rng: ``"reseed"``, the default, or ``"store"``; see `hvdrecover.elastic.commits.randomness`.
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
        rng: Randomness | None = None,
        guard: Guard | None = None,
        tensorboard: str | None = None,
        **attributes: Any,
    ) -> None:
        if variables is not None:
            attributes = {"variables": list(variables), **attributes}
        for name, value in attributes.items():
            refuse_unbuilt(f"state.{name}", value)
        self._framework, self._world = TensorFlowFramework(), TensorFlowWorld()
        self._callbacks = KeptCallbacks()
        super().__init__(
            self._framework,
            self._world,
            checkpoint=checkpoint,
            rng=rng,
            guard=guard,
            tensorboard=tensorboard,
            companions=Companions(observers=(ForgetSent(),)),
            hidden={NAME: self._callbacks},
            attributes=attributes,
        )

    @property
    def _datasets(self) -> list[ElasticDataset]:
        """The elastic data sets among the attributes."""
        return datasets(self._contents)


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
        rng: Randomness | None = None,
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
