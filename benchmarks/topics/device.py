"""The time that a commit holds training up if the state is on a CUDA device; nothing without one."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from benchmarks.measure import Reserve
from benchmarks.rows import Row
from benchmarks.states import Setting, Training
from benchmarks.topics import stall


def measure(setting: Setting) -> list[Row]:
    """A commit that is due, until the device has nothing left to do, against Horovod's and torch's ways."""
    if not torch.cuda.is_available():
        return []
    hvd.init()
    training = Training(setting.shape, trained=True, device="cuda")
    what = f"stall of a commit that is due, of a state on one {torch.cuda.get_device_name()}"
    return stall.due(what, training, setting, Reserve(training.nbytes))
