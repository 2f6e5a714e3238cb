"""Allreduces in graphs, of constants too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from tests.unit.launch.children import environment

# Horovod's timeline has a line for each allreduce that runs.
CONSTANTS = """
import os, time
from pathlib import Path
import tensorflow as tf
import hvdrecover.tensorflow as hvd
hvd.init()

@tf.function
def step():
    ones, zeros = hvd.grouped_allreduce([tf.ones(2), tf.zeros(3)], name="group", op=hvd.Sum)
    return ones, zeros, hvd.allreduce(tf.fill([2], 3.0) * 2.0, name="single", op=hvd.Sum)

for _ in range(5):
    step()
timeline = Path(os.environ["HOROVOD_TIMELINE"])
for _ in range(600):  # a thread writes it, and loses what is not written at the shutdown
    if timeline.read_text().count('"NEGOTIATE_ALLREDUCE"') >= 15:
        break
    time.sleep(0.1)
hvd.shutdown()
"""


def test_an_allreduce_of_constants_runs_in_each_call_of_its_graph(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    subprocess.run(
        [sys.executable, "-c", CONSTANTS],
        env={**environment(), "HOROVOD_TIMELINE": str(timeline)},
        check=True,
        timeout=300,
    )
    assert timeline.read_text().count('"NEGOTIATE_ALLREDUCE"') == 5 * 3


@pytest.mark.parametrize("value", [[-0.0, float("nan")], [1, -2], [[1.5], [-2.5]]])
def test_values_and_shapes_stay_the_same(value: Any) -> None:
    given = np.array(value)

    @tf.function
    def step() -> Any:
        tensor = recover.allreduce(tf.constant(given), name="values", op=recover.Sum)
        assert tensor.shape == given.shape
        return tensor

    assert step().numpy().tobytes() == given.tobytes()
