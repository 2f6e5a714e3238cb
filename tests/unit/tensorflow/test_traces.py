"""Variables of our own beside the user's traces; that real ranks trace steps again is tested elsewhere."""

from __future__ import annotations

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from horovod.tensorflow.mpi_ops import MPI_LIB
from tensorflow.python.framework import op_def_registry

from hvdrecover.tensorflow.collectives import counter


def test_a_counter_may_be_made_by_a_function_that_is_traced_again() -> None:
    counters: dict[bool, tf.Variable] = {}

    @tf.function
    def count(other: bool) -> tf.Tensor:
        counters[other] = counter()
        return counters[other].assign_add(2 if other else 1)

    assert [int(count(False)), int(count(False)), int(count(True)), int(count(True))] == [1, 2, 2, 4]
    assert {key: int(value) for key, value in counters.items()} == {False: 2, True: 4}


OPERATIONS = [name for name in vars(MPI_LIB) if name.startswith("Horovod")]
NO_CONSTANTS = ("Allreduce", "Inplace")  # of gradients and of variables


@pytest.mark.parametrize("name", [each for each in OPERATIONS if not any(x in each for x in NO_CONSTANTS)])
def test_tensorflow_runs_an_operation_of_horovods_each_time(name: str) -> None:
    """Or it would take a collective of constants for a constant."""
    assert op_def_registry.get(name).is_stateful


def test_collectives_of_a_graph_do_not_wait_for_each_other() -> None:
    """Or Horovod could fuse none of them."""

    @tf.function
    def both() -> tuple[tf.Tensor, tf.Tensor]:
        return hvd.allreduce(tf.zeros([1]), name="one"), hvd.allgather(tf.zeros([1]), name="other")

    operations = both.get_concrete_function().graph.get_operations()
    collectives = [each for each in operations if each.type in OPERATIONS]
    assert len(collectives) >= 2
    assert {each.name: [other.name for other in each.control_inputs] for each in collectives} == {
        each.name: [] for each in collectives
    }
