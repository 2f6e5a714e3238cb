import pytest

from hvdrecover.checkpoint.storage.local import LocalStorage
from tests.unit.checkpoint.roots import memory_root


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """An empty checkpoint root, of each kind."""
    if request.param == "local":
        yield LocalStorage(tmp_path / "root")
    else:
        with memory_root() as storage:
            yield storage
