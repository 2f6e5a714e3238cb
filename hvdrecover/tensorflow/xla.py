"""Refusals of what XLA can't compile."""

from __future__ import annotations

import logging

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdrecover.errors import ConfigError

logger = logging.getLogger(__name__)


def switch_off(model: keras.Model) -> None:
    """Have Keras not compile a model's training step: XLA knows none of Horovod's collectives.

    The user is told, once for each model. Keras also compiles unasked where there is an accelerator, and does
    not tell afterwards whether it was asked to.
    """
    if getattr(model, "jit_compile", False):
        logger.warning(
            "%s: jit_compile is switched off, as XLA can't compile Horovod's collectives", model.name
        )
        model.jit_compile = False


def compiles() -> bool:
    """Return whether the graph that is being made, or one around it, is for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse(what: str) -> None:
    """Raise an error if what can't be compiled is about to be.

    Raises:
        ConfigError: XLA is to compile it.
    """
    if compiles():
        raise ConfigError(
            "jit_compile",
            f"XLA can't compile {what}; pass jit_compile=False to tf.function or to model.compile, or "
            "hvdrecover's callbacks to model.fit",
        )
