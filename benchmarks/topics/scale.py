"""Figures that grow with ranks, guardians and hosts, or with the bytes and tensors of a state."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from benchmarks.rows import Found
from benchmarks.states import Setting


def measure(setting: Setting) -> Sequence[Found]:
    """Measure by ``benchmarks/scale/STATE.py``."""
    found: Sequence[Found] = importlib.import_module(f"benchmarks.scale.{setting.state}").measure(setting)
    return found
