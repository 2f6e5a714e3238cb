"""The effects of the package on a process; and the examples in the docstrings of its API."""

from __future__ import annotations

import doctest
import importlib
import sys
import types

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.keras
import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from tests.support.commands import answer
from tests.unit import api

SHOWN = [
    (each, name)
    for each in ("hvdrecover.tensorflow", "hvdrecover.tensorflow.keras")
    for name in api.names(each)
    if api.examples(each, name) and api.home(each, name).startswith("hvdrecover.tensorflow")
]


@pytest.mark.parametrize(("package", "name"), SHOWN)
def test_an_example_does_what_it_says(package: str, name: str) -> None:
    """Examples that torch has as well are tested there."""
    hvd = hvdrecover.keras if package.endswith("keras") else horovod.tensorflow
    names = {"hvd": hvd, "keras": keras, "np": np, "recover": recover, "tf": tf}
    found = doctest.DocTest(api.examples(package, name), names, name, None, None, None)
    assert doctest.DocTestRunner().run(found).failed == 0


def test_a_process_alone_needs_no_launcher_and_may_make_its_state_before_it_initialises_horovod() -> None:
    code = """
import horovod.tensorflow as hvd, numpy, sys, tensorflow as tf, hvdrecover.tensorflow as recover
from tensorflow.python.eager import context
assert not context.context()._initialized  # devices can still be chosen
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.set_visible_devices([], "GPU")
data = recover.elastic_dataset(numpy.arange(5), 5, shuffle=False)
variable = tf.Variable(1.0)
state = recover.TensorFlowState([variable], data=data, epoch=0)
state.epoch = 1
variable.assign(2.0)
state.restore()
hvd.init()
def train(state):
    batch = next(iter(data)).numpy().tolist()
    print(hvd.size(), state.epoch, float(variable), batch, state.last_commit.commit)
recover.run(train)(state)
print({"torch", "hvdrecover.torch", "horovod.torch"} & set(sys.modules))
# Threads of iterators that are left behind want Python at a time when it goes away.
iterators = [iter(recover.elastic_dataset(numpy.zeros((100_000, 4)), 2)) for _ in range(8)]
for each in iterators:
    next(each)
"""
    assert answer(code).splitlines() == ["1 0 1.0 [0, 1, 2, 3, 4] 0", "set()"]


def test_a_tensorflow_without_keras_3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(__version__="2.15.1"))
    monkeypatch.delitem(sys.modules, "hvdrecover.tensorflow")
    with pytest.raises(ConfigError, match=r"^tensorflow: .*2\.15\.1.*2\.16"):
        importlib.import_module("hvdrecover.tensorflow")
