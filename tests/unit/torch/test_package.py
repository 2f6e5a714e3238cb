"""The effects on a process of importing the adapter."""

from __future__ import annotations

import types

import hvdrecover.torch as recover
from tests.support.processes import answer

VARIANTS = [
    ({}, "gloo gloo"),
    ({"HOROVOD_RANK": "0"}, "None None"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "None None"),
    ({"PMI_RANK": "0"}, "None None"),
    ({"HOROVOD_CONTROLLER": "mpi"}, "mpi None"),
    ({"HOROVOD_CONTROLLER": "gloo"}, "gloo None"),
]

CONTROLLERS = """
import importlib, os, sys
import hvdrecover.torch
names = "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"
for variant in eval(sys.stdin.read()):
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(variant)
    importlib.reload(hvdrecover.torch)
    print(*(os.environ.get(name) for name in names))
    for name in variant:
        del os.environ[name]
"""


def test_the_public_names() -> None:
    assert recover.__all__ == sorted(recover.__all__)
    public = {name for name, value in vars(recover).items() if not isinstance(value, types.ModuleType)}
    assert set(recover.__all__) == {name for name in public if not name.startswith("_")}


def test_a_controller_is_chosen_for_a_process_that_nobody_launched() -> None:
    found = answer(CONTROLLERS, repr([environ for environ, _ in VARIANTS])).splitlines()
    assert found == [expected for _, expected in VARIANTS]
