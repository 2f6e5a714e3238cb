"""The end of a process that trained with TensorFlow."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import horovod.tensorflow as hvd
import numpy as np
import hvdrecover.tensorflow as recover

hvd.init()
iterators = [iter(recover.elastic_dataset(np.zeros((100_000, 4), np.float32), 2)) for _ in range(8)]
for each in iterators:
    next(each)
"""


def test_iterators_that_are_left_behind_keep_no_process_from_its_end() -> None:
    """Their threads want Python at a time when it goes away."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=180)
