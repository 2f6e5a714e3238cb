"""``horovod.keras.callbacks``."""

from typing import Any

import horovod.keras.callbacks as _hvd

from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.tensorflow.keras import callbacks as _callbacks
from hvdrecover.tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

__getattr__, __dir__ = _standing_in(_hvd, globals())


class BestModelCheckpoint(_callbacks.BestModelCheckpoint):
    """See `hvdrecover.tensorflow.keras.callbacks.BestModelCheckpoint`."""

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: Any = "epoch"
    ) -> None:
        super().__init__(monitor, verbose, False, mode, save_freq)
