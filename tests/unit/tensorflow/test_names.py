"""The cases in which names of variables mean the same variables."""

from __future__ import annotations

import pytest

from hvdrecover.tensorflow.variables import mean_the_same

MODEL = ["net/dense/kernel", "net/dense/bias", "net/dense_1/kernel"]
ADAM = ["adam/iteration", "adam/net_dense_kernel_momentum", "adam/net_dense_1_kernel_momentum"]


@pytest.mark.parametrize(
    ("stored", "mine"),
    [
        (MODEL, MODEL),
        (MODEL, ["net_1/dense_2/kernel", "net_1/dense_2/bias", "net_1/dense_3/kernel"]),
        (MODEL, ["dense/kernel", "dense/bias", "dense_1/kernel"]),
        (MODEL, ["outer/net/dense/kernel", "outer/net/dense/bias", "outer/net/dense_1/kernel"]),
        (ADAM, ["adam/iteration", "adam/dense_7_kernel_momentum", "adam/dense_8_kernel_momentum"]),
        (["dense/dense/kernel"], ["dense/kernel"]),
        ([], []),
    ],
)
def test_they_do(stored: list[str], mine: list[str]) -> None:
    assert mean_the_same(stored, mine)
    assert mean_the_same(mine, stored)


@pytest.mark.parametrize(
    ("stored", "mine"),
    [
        (MODEL, MODEL[:2]),
        (MODEL, ["net/dense/bias", "net/dense/kernel", "net/dense_1/kernel"]),
        (MODEL, ["other/dense/kernel", "other/dense/bias", "other/dense_1/kernel"]),
        (MODEL, ["dense/kernel", "bias", "dense_1/kernel"]),
        (MODEL, ["net/dense/kernel/x", "net/dense/bias/x", "net/dense_1/kernel/x"]),
        (["a/kernel", "b/kernel"], ["net/a/kernel", "other/b/kernel"]),
        (["a/kernel"], ["b/kernel"]),
        (["kernel"], ["mykernel"]),
        (ADAM, ["sgd/iteration", "sgd/dense_kernel_momentum", "sgd/dense_1_kernel_momentum"]),
        (ADAM, ["adam/iteration", "adam/dense_bias_momentum", "adam/dense_1_kernel_momentum"]),
    ],
)
def test_they_do_not(stored: list[str], mine: list[str]) -> None:
    assert not mean_the_same(stored, mine)
    assert not mean_the_same(mine, stored)
