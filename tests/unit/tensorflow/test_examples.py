"""The examples in docstrings of the API do what they say; what torch has as well is tested there."""

from __future__ import annotations

import doctest

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.keras
import hvdrecover.tensorflow as recover
from tests.unit import api

PACKAGES = ("hvdrecover.tensorflow", "hvdrecover.tensorflow.keras")
SHOWN = [
    (each, name)
    for each in PACKAGES
    for name in api.names(each)
    if api.examples(each, name) and api.home(each, name).startswith("hvdrecover.tensorflow")
]


@pytest.mark.parametrize(("package", "name"), SHOWN)
def test_an_example_does_what_it_says(package: str, name: str) -> None:
    hvd = hvdrecover.keras if package.endswith("keras") else horovod.tensorflow
    names = {"hvd": hvd, "keras": keras, "np": np, "recover": recover, "tf": tf}
    found = doctest.DocTest(api.examples(package, name), names, name, None, None, None)
    assert doctest.DocTestRunner().run(found).failed == 0
