"""States of generators out of commits that were made to do harm."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdrecover.state import random as streams


@pytest.fixture(autouse=True)
def as_before() -> Any:
    python, mine = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(mine)


@pytest.mark.parametrize("take", [streams.python_state, random.getstate])  # older commits have the latter
def test_a_state_continues_where_it_was(take: Callable[[], Any]) -> None:
    random.gauss(0, 1)
    python, mine = take(), np.random.get_state(legacy=False)
    drawn = random.random(), np.random.normal()
    streams.set_python(python)
    streams.set_numpy(mine)
    assert (random.random(), np.random.normal()) == drawn


@pytest.mark.parametrize("place", [10**8, 625, -1, 2**70])
def test_a_place_beyond_the_buffer_is_refused_and_the_process_lives(place: int) -> None:
    script = f"""
import numpy as np
from hvdrecover.state import random as streams
state = np.random.get_state(legacy=False)
state["state"]["pos"] = {place}
try:
    streams.set_numpy(state)
except ValueError as error:
    print(error)
np.random.random(2000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and re.fullmatch(f"numpy.* {place}\n", done.stdout)
