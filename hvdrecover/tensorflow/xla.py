"""What XLA can't compile."""

from __future__ import annotations

import logging

import keras

logger = logging.getLogger("hvdrecover")


def switch_off(model: keras.Model) -> None:
    """Have Keras not compile a model's training step: XLA knows none of Horovod's collectives.

    Keras compiles where it can unless told otherwise; only who has asked for it is told.
    """
    if not getattr(model, "jit_compile", False):
        return
    if (model.get_compile_config() or {}).get("jit_compile") is True:
        logger.warning(
            "%s: jit_compile=True is switched off, as XLA can't compile Horovod's collectives", model.name
        )
    model.jit_compile = False
