from __future__ import annotations

import contextlib
import functools
import importlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.storage import Storage
from tests.contracts import servers, storages
from tests.contracts.adapters import Adapter
from tests.contracts.servers import SSHD, STORES, Mounts, ObjectStore, S3Server, SftpServer
from tests.contracts.storages import Backend
from tests.integration.conftest import LONG
from tests.unit.checkpoint.roots import memory_root

SERVED = [pytest.param(name, marks=LONG) for name in STORES]
REAL = [*SERVED, pytest.param("moosefs", marks=LONG)]


@pytest.fixture(params=["fake", "torch", "tensorflow"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """Each adapter in turn; its framework is imported only when it is tested."""
    made: Adapter = importlib.import_module(f"tests.contracts.{request.param}_adapter").made()
    return made


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def sftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftpServer]:
    if SSHD is None:
        message = "there is no sshd to test SFTP with; on Debian and Ubuntu: apt-get install openssh-server"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    server = SftpServer(tmp_path_factory.mktemp("sshd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def object_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ObjectStore]]:
    """Gives the object store of a name, which is started once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def started(name: str) -> ObjectStore:
            server = STORES[name](tmp_path_factory.mktemp(name))
            server.start()
            stack.callback(server.stop)
            return server

        yield started


def _backend(name: str) -> Any:
    @pytest.fixture(name=name)
    def backend(object_stores: Callable[[str], ObjectStore], monkeypatch: pytest.MonkeyPatch) -> Backend:
        return storages.object_store(object_stores(name), monkeypatch)

    return backend


seaweedfs, azurite, gcs = map(_backend, STORES)


@pytest.fixture(scope="session")
def moosefs_mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    with servers.moosefs(tmp_path_factory.mktemp("moosefs")) as places:
        yield places


@pytest.fixture
def moosefs(moosefs_mounts: Mounts) -> Backend:
    name = uuid.uuid4().hex
    (moosefs_mounts[0] / name).mkdir()
    return storages.local(*(place / name for place in moosefs_mounts))


@pytest.fixture
def local(tmp_path: Path) -> Backend:
    return storages.local(tmp_path)


@pytest.fixture
def memory() -> Iterator[Backend]:
    with memory_root() as root:
        yield Backend(root.url, (1 << 25) + 5)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.s3(s3_server, monkeypatch)


@pytest.fixture
def sftp(sftp_server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.sftp(sftp_server, tmp_path, monkeypatch)


# The whole contract takes a minute for a kind of storage. The usual run tests two kinds by the whole contract
# and the others by its core. LONG=1 tests each kind by the whole contract.
OTHERS = ["memory", "sftp"]
WHOLE = ["local", "s3", *(pytest.param(name, marks=LONG) for name in OTHERS), *REAL]
core = pytest.mark.parametrize("backend", ["local", "s3", *OTHERS, *REAL], indirect=True)


@pytest.fixture(params=WHOLE)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each kind of storage in turn."""
    made: Backend = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def storage(backend: Backend) -> Storage:
    return backend.open()
