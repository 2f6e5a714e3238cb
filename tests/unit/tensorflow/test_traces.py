"""Variables of our own beside the user's traces; that real ranks trace steps again is tested elsewhere."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from horovod.tensorflow.mpi_ops import MPI_LIB
from tensorflow.python.framework import op_def_registry

import hvdrecover.tensorflow as recover
from hvdrecover.tensorflow.collectives import counter


def test_a_counter_may_be_made_by_a_function_that_is_traced_again() -> None:
    counters: dict[bool, tf.Variable] = {}

    @tf.function
    def count(other: bool) -> tf.Tensor:
        counters[other] = counter()
        return counters[other].assign_add(2 if other else 1)

    assert [int(count(False)), int(count(False)), int(count(True)), int(count(True))] == [1, 2, 2, 4]
    assert {key: int(value) for key, value in counters.items()} == {False: 2, True: 4}


def test_a_step_is_traced_again_with_everything_that_makes_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr("hvdrecover.tensorflow.averaging.own.wanted", True)
    variable, traces = tf.Variable([1.0, 2.0]), []

    @tf.function
    def step(data: tf.Tensor, reduce: bool = True) -> Any:
        traces.append(reduce)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * tf.reduce_sum(data)
        if reduce:
            tape = recover.DistributedGradientTape(tape)
        return tape.gradient(loss, variable)

    step(tf.ones([2]), reduce=False)
    assert [step(tf.ones([size])).numpy().tolist() for size in (2, 3, 2)] == [[2.0] * 2, [3.0] * 2, [2.0] * 2]
    assert traces == [False, True, True]


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
