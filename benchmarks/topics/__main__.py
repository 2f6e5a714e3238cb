"""Measure in this process: ``python -m benchmarks.topics SIZE FOLDER RESULT TOPIC:STATE …``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.rows import Fact, Row, dump
from benchmarks.states import Setting

size, parent, result, *asked = sys.argv[1:]
found: list[Row | Fact] = []
for topic, state in (each.split(":") for each in asked):
    folder = Path(parent, f"{topic}-{state}")
    folder.mkdir()
    module = importlib.import_module(f"benchmarks.topics.{topic}")
    found += module.measure(Setting(size, state, folder))
dump(found, Path(result))
