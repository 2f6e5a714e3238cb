"""The effects on a process of importing the adapter."""

from __future__ import annotations

import types

import hvdrecover.tensorflow as recover
from tests.unit.processes import answer


def test_the_public_names() -> None:
    public = {name for name, value in vars(recover).items() if not isinstance(value, types.ModuleType)}
    assert set(recover.__all__) == {name for name in public if not name.startswith("_")}


def test_neither_torch_nor_its_adapter_is_imported() -> None:
    imported = answer("import sys, hvdrecover.tensorflow; print(*sys.modules)").split()
    assert "hvdrecover.tensorflow" in imported
    assert "torch" not in {name.split(".")[0] for name in imported}
    assert not [name for name in imported if name.startswith(("hvdrecover.torch", "horovod.torch"))]


def test_a_process_alone_needs_no_launcher_and_may_make_its_state_before_it_initialises_horovod() -> None:
    code = """
import horovod.tensorflow as hvd, numpy, tensorflow as tf, hvdrecover.tensorflow as recover
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
"""
    assert answer(code) == "1 0 1.0 [0, 1, 2, 3, 4] 0"
