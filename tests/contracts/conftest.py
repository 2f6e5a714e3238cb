from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.checkpoint.storage import Storage
from tests.contracts import mounts, storages
from tests.contracts.adapters import Adapter
from tests.contracts.mounts import Mounts
from tests.contracts.object_stores import STORES, ObjectStore
from tests.contracts.servers import SSHD, S3Server, SftpServer
from tests.contracts.storages import Backend
from tests.integration.conftest import LONG

SERVED = [pytest.param(name, marks=LONG) for name in STORES]
REAL = [*SERVED, pytest.param("moosefs", marks=LONG)]


def _fake() -> Adapter:
    from tests.contracts.fake_adapter import FakeAdapter

    return FakeAdapter()


def _torch() -> Adapter:
    from tests.contracts.torch_adapter import TorchAdapter

    return TorchAdapter()


def _tensorflow() -> Adapter:
    from tests.contracts.tensorflow_adapter import TensorFlowAdapter

    return TensorFlowAdapter()


@pytest.fixture(params=[_fake, _torch, _tensorflow], ids=["fake", "torch", "tensorflow"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """Each adapter in turn; its framework is imported only when it is tested."""
    made: Adapter = request.param()
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


def _served(name: str, factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    server = STORES[name](factory.mktemp(name))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    yield from _served("seaweedfs", tmp_path_factory)


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    yield from _served("azurite", tmp_path_factory)


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    yield from _served("gcs", tmp_path_factory)


@pytest.fixture
def seaweedfs(seaweedfs_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.object_store(seaweedfs_server, monkeypatch)


@pytest.fixture
def azurite(azurite_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.object_store(azurite_server, monkeypatch)


@pytest.fixture
def gcs(gcs_server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.object_store(gcs_server, monkeypatch)


@pytest.fixture(scope="session")
def moosefs_mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    with mounts.moosefs(tmp_path_factory.mktemp("moosefs")) as places:
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
def drill(tmp_path: Path) -> Backend:
    return storages.drill(tmp_path)


@pytest.fixture
def memory() -> Iterator[Backend]:
    with storages.memory() as backend:
        yield backend


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.s3(s3_server, monkeypatch)


@pytest.fixture
def sftp(sftp_server: SftpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    return storages.sftp(sftp_server, tmp_path, monkeypatch)


# The whole contract takes a minute for a kind of storage. The usual run tests two kinds by the whole contract
# and the others by its core. LONG=1 tests each kind by the whole contract.
OTHERS = ["drill", "memory", "sftp"]
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
