"""The examples in docstrings of the API do what they say."""

from __future__ import annotations

import doctest

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvdrecover.torch as recover
from tests.unit import api

PACKAGES = ("hvdrecover", "hvdrecover.torch")
SHOWN = [(each, name) for each in PACKAGES for name in api.names(each) if api.examples(each, name)]


@pytest.mark.parametrize(("package", "name"), SHOWN)
def test_an_example_does_what_it_says(package: str, name: str) -> None:
    names = {"hvd": hvd, "np": np, "recover": recover, "torch": torch}
    found = doctest.DocTest(api.examples(package, name), names, name, None, None, None)
    assert doctest.DocTestRunner().run(found).failed == 0
