"""``horovod.keras.elastic``."""

import horovod.keras.elastic as _hvd

from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.tensorflow.keras.elastic import (
    CommitStateCallback,
    KerasState,
    TensorFlowKerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

__getattr__, __dir__ = _standing_in(_hvd, globals())
