"""Lets processes that a test starts find hvdrecover_ray, whether it is installed or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE_FOLDER = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True, scope="session")
def package_on_the_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PACKAGE_FOLDER, prepend=os.pathsep)
        yield
