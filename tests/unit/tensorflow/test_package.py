"""The effects on a process of importing the adapter."""

from __future__ import annotations

import types

import hvdrecover.tensorflow as recover
from tests.support.processes import answer


def test_the_public_names() -> None:
    public = {name for name, value in vars(recover).items() if not isinstance(value, types.ModuleType)}
    assert set(recover.__all__) == {name for name in public if not name.startswith("_")}


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
"""
    assert answer(code).splitlines() == ["1 0 1.0 [0, 1, 2, 3, 4] 0", "set()"]
