"""A script that imports Horovod's modules gets ours. Each case is a process, as imports happen once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIGHT = Path(__file__).parents[1] / "integration" / "light"  # leaves out most of torch's imports

INSTALL = """
import importlib, sys
from hvdrecover import config, stand_in
stand_in.install(config.Config(no_stand_in=False))
assert not {"torch", "tensorflow", "horovod"} & set(sys.modules)
"""


def output_of(script: str) -> list[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LIGHT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("hvdrecover: ")]


def test_all_ways_to_import_horovod_for_torch_give_ours() -> None:
    told = output_of(
        INSTALL
        + """
hvd = importlib.import_module("horovod.torch")  # as a library may do it
import horovod, horovod.torch.elastic
from horovod.torch import *
from horovod.torch.elastic import TorchState, run
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.mpi_ops import allreduce_async  # which has no counterpart here
import hvdrecover.torch as recover

assert hvd is horovod.torch is sys.modules["horovod.torch"]
assert TorchState is hvd.elastic.TorchState is horovod.torch.elastic.TorchState is recover.elastic.TorchState
assert (run, ElasticSampler) == (recover.run, recover.elastic.ElasticSampler)
assert allreduce is hvd.allreduce is recover.allreduce
assert hvd.mpi_ops.allreduce_async is allreduce_async
assert hvd.__spec__.origin == hvd.__file__ and hvd.__file__.endswith("horovod/torch/__init__.py")
assert horovod.__version__ == "0.28.1"
"""
    )
    assert told == [
        "hvdrecover: horovod.torch is hvdrecover's in this job; with --no-stand-in, it is Horovod's"
    ]


@pytest.mark.parametrize("first", ["horovod.keras", "horovod.tensorflow.keras.callbacks"])
def test_all_ways_to_import_horovod_for_tensorflow_give_ours(first: str) -> None:
    told = output_of(
        INSTALL
        + f"import {first}"
        + """
import horovod.keras, horovod.tensorflow as hvd, horovod.tensorflow.elastic
import horovod.tensorflow.keras as of_keras
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.mpi_ops import _allreduce
import hvdrecover.keras, hvdrecover.tensorflow as recover, hvdrecover.tensorflow.keras

assert hvd.DistributedGradientTape is recover.DistributedGradientTape
assert hvd.elastic.TensorFlowState is recover.elastic.TensorFlowState
assert horovod.tensorflow.elastic.TensorFlowState is recover.elastic.TensorFlowState
assert MetricAverageCallback is hvdrecover.tensorflow.keras.callbacks.MetricAverageCallback
assert of_keras.DistributedOptimizer is hvdrecover.tensorflow.keras.DistributedOptimizer
assert horovod.keras.DistributedOptimizer is hvdrecover.keras.DistributedOptimizer
"""
    )
    assert len(told) == 1


@pytest.mark.parametrize(
    "script",
    [
        INSTALL + "import hvdrecover.torch\n",
        INSTALL.replace("False", "True"),
    ],
    ids=["imports hvdrecover itself", "no stand-in"],
)
def test_otherwise_horovods_modules_stay(script: str) -> None:
    told = output_of(
        script
        + """
import horovod.torch.elastic
assert horovod.torch.elastic.TorchState.__module__ == "horovod.torch.elastic.state"
"""
    )
    assert told == []
