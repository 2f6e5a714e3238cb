"""Damaged and malicious checkpoints: reading them gives an error of ours, runs no code and touches no file.

An attacker can make digests that match. So these do, and the tests reach the checks behind the digests.
"""

import contextlib
import copy
import math
import os
import resource
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from hvdrecover.checkpoint import CommitId, values
from hvdrecover.checkpoint.arena import digest
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.root import read_commit
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError, MismatchError, StorageError
from hvdrecover.state.contents import Contents
from tests.fakes.framework import FakeFramework, FakeModel, FakeSampler
from tests.unit.checkpoint import golden
from tests.unit.checkpoint.roots import make_snapshot, make_store, signed

ID = CommitId(1, 2)
SPARE = 256 << 20  # bytes of address space; threads' stacks and heaps take most of it
TEMPORARY = Path(tempfile.gettempdir())
REFUSED = (CorruptCheckpointError, FormatVersionError)


@pytest.fixture(autouse=True, scope="module")
def no_large_allocation():
    """More than a little memory is a MemoryError, which no test here expects."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def cases(count):
    """So many, the same in each run. One that fails is shown as it is: to shrink it would take minutes."""
    return settings(
        max_examples=count,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        deadline=None,
    )


# -- what must not happen -------------------------------------------------------------------------------

_RUNS = ("import", "exec", "compile", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn")
_RUNS += ("pickle.", "subprocess.", "ctypes.", "pty.", "socket.connect", "socket.bind")
_TOUCHES = ("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
_ZONES = ("/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo")
_watch = threading.local()


def _audit(event, arguments):
    noted = getattr(_watch, "noted", None)
    if noted is not None and event.startswith(_RUNS + _TOUCHES):
        noted.append((event, arguments[:2]))


sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(root):
    """Nothing is imported or run meanwhile, and no file outside the root is opened or changed."""
    modules = set(sys.modules)
    _watch.noted = []
    try:
        yield
    finally:
        noted, _watch.noted = _watch.noted, None
    for event, facts in noted:
        assert event in _TOUCHES, (event, facts)
        path = facts[0]
        assert isinstance(path, int) or str(path).startswith((f"{root}", *_ZONES)), (event, facts)
    assert set(sys.modules) == modules


# -- commits ----------------------------------------------------------------------------------------------


MODEL = (56).to_bytes(8, "little") + b"{}".ljust(56)  # a safetensors file without tensors
FIELDS = {
    "format": 1,
    "generation": ID.generation,
    "commit": ID.commit,
    "time": 1.5,
    "writer": {"host": "h", "pid": 1, "rank": 0},
    "world_size": 2,
    "versions": {"fake": "1.0"},
    "files": [{"name": "model.safetensors", "size": len(MODEL), "digest": digest(MODEL)}],
    "state": {"attributes": {}, "samplers": {}},
    "dataset": None,
    "finished": False,
}


@pytest.fixture(scope="module")
def roots():
    """The place of roots: in memory, for there are thousands, and readers fsync what they leave."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def write(roots, manifest):
    """A root with one commit of this manifest and a model."""
    root = Path(tempfile.mkdtemp(dir=roots))
    folder = root / ID.name
    folder.mkdir(parents=True)
    (folder / FILE_NAME).write_bytes(manifest)
    (folder / "model.safetensors").write_bytes(MODEL)
    return root


def read(root):
    """Read the commit; None if it is refused as it should be."""
    storage = LocalStorage(root)
    with watched(root):
        try:
            return read_commit(storage, ID)
        except REFUSED as error:
            assert str(error).startswith(f"file://{root}/{ID.name}/")
            return None


# -- hostile values ---------------------------------------------------------------------------------------


def deep(levels, kind=list):
    value = 1
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


HOSTILE = st.one_of(
    st.sampled_from([None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, math.nan, math.inf]),
    st.sampled_from(["", "../../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "9" * 5000, "model"]),
    st.sampled_from(["os:system", "antigravity:x", "enum:Flag", "builtins:eval", "READ|8", "<U0", "|O"]),
    st.sampled_from([[], {}, [[]], [10**9, 2**40], {"$set": [[1]]}, {"$enum": ["subprocess:Popen", "x"]}]),
    st.sampled_from([deep(90), deep(500), deep(900, dict), deep(3000)]),
)


def places(value, path=()):
    """Yield the path to every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


@st.composite
def altered(draw, value):
    """A JSON value of which a few parts are replaced or removed."""
    value = copy.deepcopy(value)
    inner = [path for path in places(value) if path]
    chosen = draw(st.lists(st.sampled_from(inner), min_size=1, max_size=3, unique=True))
    for path in sorted(chosen, key=len, reverse=True):  # the innermost first, so all paths stay valid
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.integers(0, 2)):
            holder[path[-1]] = draw(HOSTILE)
        elif isinstance(holder, dict):
            del holder[path[-1]]
    return value


def made(fields):
    """Return the bytes of a manifest; skip fields that JSON cannot hold."""
    try:
        return signed(fields)
    except (ValueError, RecursionError):
        assume(False)


# -- manifests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b'{"digest": NaN}', b"\xff\xfe{\0"],
)
def test_any_bytes_as_a_manifest_are_refused(roots, text):
    assert read(write(roots, text)) is None


@cases(40)
@given(fields=altered(FIELDS))
def test_an_altered_manifest_with_a_matching_digest_is_refused_or_harmless(roots, fields):
    root = write(roots, made(fields))
    snapshot = read(root)
    if snapshot is not None:
        assert snapshot.id == ID
        assert set(snapshot.arenas) <= {"model"}
        present = {"model": FakeModel(weight=[1.0, 2.0]), "sampler": FakeSampler(10), "step": 0}
        contents = Contents(FakeFramework(), present, reserved=set())
        with watched(root), contextlib.suppress(CorruptCheckpointError, MismatchError):
            contents.load(snapshot.state, snapshot.arenas, "the commit", strict=False)


# -- states -----------------------------------------------------------------------------------------------

OBJECTS = values.encode(golden.OBJECTS, "objects")  # each kind of value


@cases(80)
@given(objects=altered(OBJECTS))
def test_a_value_of_any_kind_made_to_do_harm_is_a_value_error_or_harmless(objects):
    with watched(TEMPORARY), contextlib.suppress(ValueError):
        values.decode(objects)


# -- files that are not ordinary ones -----------------------------------------------------------------------


def root_with_a_commit(tmp_path):
    root = tmp_path / "root"
    store = make_store(LocalStorage(root), keep=1)
    store.claim_next()
    store.write(make_snapshot(1, 2), rank=0)
    return root, store


def test_a_manifest_of_a_terabyte_takes_no_memory(tmp_path):
    root, _ = root_with_a_commit(tmp_path)
    with (root / ID.name / FILE_NAME).open("wb") as file:
        file.truncate(1 << 40)
    assert read(root) is None


@pytest.mark.parametrize("name", [FILE_NAME, "model.safetensors"])
def test_a_file_that_is_a_pipe_does_not_hang(tmp_path, name):
    root, _ = root_with_a_commit(tmp_path)
    (root / ID.name / name).unlink()
    os.mkfifo(root / ID.name / name)
    assert read(root) is None


@pytest.fixture
def outside(tmp_path):
    """A folder that is none of ours, and looks like a commit."""
    folder = tmp_path / "outside"
    folder.mkdir()
    theirs = dict.fromkeys((FILE_NAME, "model.safetensors", "QUARANTINE.json", "g0001.json"), b"theirs")
    for name, data in theirs.items():
        (folder / name).write_bytes(data)
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == theirs


def test_a_commit_folder_that_is_a_link_is_not_written_or_deleted_through(tmp_path, outside):
    root, store = root_with_a_commit(tmp_path)
    for name in ("g0001-c00000001", "g0001-c00000003", "g0001-c00000004"):
        (root / name).symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic link"):
        store.write(make_snapshot(1, 3), rank=0)
    later = make_store(LocalStorage(root), keep=1)
    generation = later.claim_next()
    for number in (5, 6, 7):
        later.write(make_snapshot(generation, number), rank=0)
    with contextlib.suppress(StorageError):
        LocalStorage(root).delete("g0001-c00000004")
