"""``horovod.keras``: `hvdrecover.tensorflow.keras`, where Horovod has it under another name."""

import sys as _sys

import horovod.keras as _hvd

from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.tensorflow.collectives import taking_what as _taking_what
from hvdrecover.tensorflow.keras import PartialDistributedOptimizer, callbacks, elastic, load_model
from hvdrecover.tensorflow.optimizer import distribute as _distribute

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "callbacks", "elastic", "load_model"]

__getattr__, __dir__ = _standing_in(_hvd, globals())

# Scripts import the two modules by these names, too.
_sys.modules |= {f"{__name__}.callbacks": callbacks, f"{__name__}.elastic": elastic}

DistributedOptimizer = _taking_what(_hvd.DistributedOptimizer, _distribute)
"""See `hvdrecover.tensorflow.optimizer.distribute`; it takes what Horovod's takes."""
