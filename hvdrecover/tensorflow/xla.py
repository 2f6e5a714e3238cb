"""What XLA can't compile."""

from __future__ import annotations

import logging

import keras

logger = logging.getLogger("hvdrecover")


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
