"""``horovod.keras.elastic``: the same as `hvdrecover.tensorflow.keras.elastic`."""

import horovod.keras.elastic as _hvd

from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.tensorflow.keras.elastic import *  # noqa: F403
from hvdrecover.tensorflow.keras.elastic import __all__ as __all__

__getattr__, __dir__ = _standing_in(_hvd, globals())
