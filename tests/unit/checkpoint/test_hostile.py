"""Checkpoints made to do harm: reading them gives an error of ours, and nothing else happens.

Whoever can write to a root can make digests that match; so these do, and what is tested is what lies behind.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import resource
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.layout import ITEM_BYTES
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError, MismatchError, StorageError
from tests.fakes.framework import FakeFramework, FakeModel, FakeSampler
from tests.unit.checkpoint import golden
from tests.unit.checkpoint.roots import make_snapshot, make_store

ID = CommitId(1, 2)
SPARE = 256 << 20  # bytes of address space; threads' stacks and heaps take most of it
TEMPORARY = Path(tempfile.gettempdir())
KINDS = (golden.Access, golden.Phase, golden.Point, golden.Schedule)
CLASSES = [f"{kind.__module__}:{kind.__qualname__}" for kind in KINDS]
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
    """So many; one that fails is shown as it is, for shrinking thousands of roots would take minutes."""
    phases = [Phase.explicit, Phase.generate]
    return settings(max_examples=count, phases=phases, suppress_health_check=list(HealthCheck))


# -- what must not happen -------------------------------------------------------------------------------

_RUNS = (
    "import",
    "exec",
    "compile",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "pickle.",
)
_RUNS += ("subprocess.", "ctypes.", "pty.", "socket.connect", "socket.bind")
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


def valid_fields(files=None, state=None):
    files = {"model.safetensors": safetensors({})} if files is None else files
    return {
        "format": 1,
        "generation": ID.generation,
        "commit": ID.commit,
        "time": 1.5,
        "writer": {"host": "h", "pid": 1, "rank": 0},
        "world_size": 2,
        "versions": {"fake": "1.0"},
        "files": [{"name": name, "size": len(data), "digest": digest(data)} for name, data in files.items()],
        "state": {"attributes": {}, "samplers": {}} if state is None else state,
        "dataset": None,
        "finished": False,
    }


def signed(text):
    """A manifest of this JSON with a digest that matches, if there can be one."""
    fields = json.loads(text)
    canonical = json.dumps(fields, separators=(",", ":")).encode()
    return text.rstrip()[:-1].encode() + b',"digest":"' + digest(canonical).encode() + b'"}'


def safetensors(entries, body=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    padded = text + b" " * (-(8 + len(text)) % 64)
    return len(padded).to_bytes(8, "little") + padded + body


_numbers = itertools.count()


@pytest.fixture(scope="module")
def roots():
    """The place of roots: in memory, for there are thousands, and readers fsync what they leave."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def write(roots, manifest, files=()):
    """A root with one commit of this manifest and these files."""
    root = roots / str(next(_numbers))
    folder = root / ID.name
    folder.mkdir(parents=True)
    (folder / FILE_NAME).write_bytes(manifest)
    for name, data in dict(files).items():
        (folder / name).write_bytes(data)
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


def load(snapshot, root, *, strict):
    """Load what was read into a state, as `State` does."""
    framework = FakeFramework()
    present = {"model": FakeModel(weight=[1.0, 2.0]), "sampler": FakeSampler(10), "step": 0}
    contents = Contents(framework, present, reserved=set())
    with watched(root), contextlib.suppress(CorruptCheckpointError, MismatchError):
        contents.load(snapshot.state, snapshot.arenas, "the commit", strict=strict)


# -- hostile values ---------------------------------------------------------------------------------------


def deep(levels, kind=list):
    value = 1
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 255, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 10**4000]),
    st.sampled_from([-1.0, 0.5, -0.0, 1e308, math.nan, math.inf, -math.inf]),
    st.sampled_from(["", "..", "../../x", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "9" * 5000, "model"]),
    st.text(max_size=8),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)
ANYTHING = st.one_of(SCALARS, JSON, st.sampled_from([deep(90), deep(500), deep(900, dict), deep(3000)]))


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*path, key))


@st.composite
def altered(draw, value):
    """A JSON value with a few of its parts replaced or removed, or with more."""
    value = copy.deepcopy(value)
    chosen = draw(st.lists(st.sampled_from(list(places(value))), min_size=1, max_size=3, unique=True))
    for path in sorted(chosen, key=len, reverse=True):  # the innermost first: what is put in stays as it is
        if not path:
            return draw(ANYTHING)
        *way, last = path
        holder = value
        for key in way:
            holder = holder[key]
        match draw(st.sampled_from(["replace", "replace", "remove", "add"])):
            case "replace":
                holder[last] = draw(ANYTHING)
            case "remove":
                del holder[last]
            case "add":
                value[draw(st.sampled_from(["digest", "x", "__class__"]))] = draw(ANYTHING)
    return value


# -- manifests --------------------------------------------------------------------------------------------


@cases(100)
@given(text=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(str.encode)))
@example(text=b"[" * 100_000)
@example(text=b'{"a":' * 50_000)
@example(text=b"9" * 100_000)
@example(text=b'{"digest": NaN}')
@example(text=b"\xff\xfe{\x00}\x00")
def test_any_bytes_as_a_manifest_are_refused(roots, text):
    assert read(write(roots, text)) is None


@cases(250)
@given(fields=altered(valid_fields()))
def test_a_manifest_altered_and_signed_anew_is_refused_or_harmless(roots, fields):
    try:
        text = json.dumps(fields)
        manifest = signed(text) if isinstance(fields, dict) and "digest" not in fields else text.encode()
    except (ValueError, RecursionError):
        assume(False)
    root = write(roots, manifest, {"model.safetensors": safetensors({})})
    snapshot = read(root)
    if snapshot is not None:
        assert snapshot.id == ID
        assert set(snapshot.arenas) <= {"model"}
        load(snapshot, root, strict=False)


NAMES = st.sampled_from(
    [
        *("../x.safetensors", "/etc/passwd", "/etc/x.safetensors", "a/../../b.safetensors", "..safetensors"),
        *("a\0.safetensors", "model.safetensors\0", "model.safetensors\n", "MODEL.safetensors", "m.pt", ""),
        *(FILE_NAME, "QUARANTINE.json", "\ud800.safetensors", "ü.safetensors", "x" * 300 + ".safetensors"),
        *("model.safetensors", "model.safetensors/.", ".", "..", "~root.safetensors", "C:\\x.safetensors"),
    ]
)
FILE_ENTRIES = st.fixed_dictionaries(
    {"name": st.one_of(NAMES, ANYTHING)},
    optional={"size": st.one_of(st.just(72), ANYTHING), "digest": ANYTHING, "x": ANYTHING},
)


@cases(150)
@given(entries=st.lists(st.one_of(FILE_ENTRIES, ANYTHING), max_size=3), alike=st.booleans())
def test_files_that_a_manifest_must_not_name_are_not_touched(roots, entries, alike):
    data = safetensors({})
    if alike:  # right in all but the name
        facts = {"size": len(data), "digest": digest(data)}
        entries = [{**entry, **facts} if isinstance(entry, dict) else entry for entry in entries]
    try:
        text = json.dumps({**valid_fields(), "files": entries})
        manifest = signed(text)
    except (ValueError, RecursionError):
        assume(False)
    (roots / "x.safetensors").write_bytes(data)
    snapshot = read(write(roots, manifest, {"model.safetensors": data}))
    assert snapshot is None or set(snapshot.arenas) <= {"model"}


@pytest.mark.parametrize("key", list(valid_fields()))
def test_a_key_that_is_there_twice_counts_once(roots, key):
    data = safetensors({})
    text = json.dumps(valid_fields())
    doubled = text[:-1] + f', "{key}": [[["hostile"]]]}}'
    snapshot = read(write(roots, signed(doubled), {"model.safetensors": data}))
    assert snapshot is None


# -- tensors' headers --------------------------------------------------------------------------------------

OFFSETS = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30]), ANYTHING)
HEADER_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(sorted(ITEM_BYTES)), ANYTHING),
        "shape": st.one_of(st.lists(st.integers(0, 4), max_size=3), st.lists(OFFSETS, max_size=70), ANYTHING),
        "data_offsets": st.one_of(st.tuples(OFFSETS, OFFSETS).map(list), ANYTHING),
    }
)
HEADER = st.dictionaries(
    st.one_of(st.text(max_size=5), st.sampled_from(["weight", "__metadata__", "a\0b", "\ud800", "../x"])),
    st.one_of(HEADER_ENTRIES, ANYTHING),
    max_size=4,
)


@st.composite
def nearly_right_headers(draw):
    """Tensors that lie one after the other, but for a byte or an odd number here and there."""
    entries, position = {}, 0
    for index in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        start = max(0, position + draw(st.sampled_from([0, 0, 0, 0, -1, 1])))
        end = start + ITEM_BYTES[dtype] * math.prod(shape) + draw(st.sampled_from([0, 0, 0, 0, 0, -1, 1]))
        offsets: list[object] = [start, end]
        for numbers in (shape, offsets):
            if numbers and draw(st.integers(0, 9)) == 0:
                number = numbers[0]
                numbers[0] = draw(
                    st.sampled_from([float(number), bool(number), -1, str(number), [number], None])
                )
        entries[str(index)] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position = end
    return entries, max(0, position + draw(st.sampled_from([0, 0, 0, -1, 1])))


def check_header(roots, data, state=None):
    files = {"model.safetensors": data}
    root = write(roots, signed(json.dumps(valid_fields(files, state))), files)
    snapshot = read(root)
    if snapshot is None:
        return
    layout = snapshot.arenas["model"].layout
    ends = [layout.offsets[spec.name] + spec.nbytes for spec in layout.specs]
    assert [*(layout.offsets[spec.name] for spec in layout.specs), len(data)] == [len(layout.header), *ends]
    for spec in layout.specs:
        assert layout.offsets[spec.name] % ITEM_BYTES[spec.dtype] == 0
        assert snapshot.arenas["model"].bytes_of(spec.name).size == spec.nbytes
    load(snapshot, root, strict=False)


@cases(150)
@given(entries=HEADER, body=st.binary(max_size=40))
def test_a_header_of_nonsense_is_refused(roots, entries, body):
    try:
        data = safetensors(entries, body)
    except (ValueError, RecursionError):
        assume(False)
    check_header(roots, data)


@cases(150)
@given(header=nearly_right_headers())
def test_tensors_that_overlap_leave_gaps_or_end_elsewhere_are_refused(roots, header):
    entries, nbytes = header
    state = {"attributes": {"model": {name: {"$tensor": name} for name in entries}}, "samplers": {}}
    check_header(roots, safetensors(entries, bytes(nbytes)), state)


@cases(75)
@given(data=st.binary(max_size=120), length=st.one_of(st.none(), st.integers(0, 2**64 - 1)))
@example(data=b"[" * 50_000, length=50_000)
@example(data=b'{"a":' * 20_000, length=100_000)
@example(data=b"", length=2**64 - 1)
def test_any_bytes_as_a_data_file_are_refused(roots, data, length):
    check_header(roots, data if length is None else length.to_bytes(8, "little") + data)


# -- states -----------------------------------------------------------------------------------------------

TAGS = [*values._UNPACK, "$tensor", "$unknown", "$"]
DTYPES = ["<f4", ">i2", "|b1", "|S0", "<U0", "|S1", "<U1", "<U2", "<M8[s]", "<m8[ns]", "|O", "|V8", "<f4,<f4"]
LITTLE = ["", "AAAA", "AAAAAAAAAAA=", "/////w==", "AAAAPw==", "!"]
NUMPY = st.tuples(
    st.one_of(st.sampled_from([*DTYPES, "<M8[x]", "f3", "S2147483647", "S" + "9" * 30, "<i٣"]), ANYTHING),
    st.one_of(
        st.just([]),
        st.lists(st.sampled_from([0, 1, 2, 10**9, 2**40, 2**62, -1, True, 1.0, "a"]), max_size=5),
        ANYTHING,
    ),
    st.one_of(st.sampled_from(LITTLE), ANYTHING),
    st.one_of(st.booleans(), ANYTHING),
).map(list)
CLASS_NAMES = st.one_of(
    st.sampled_from(
        [
            *CLASSES,
            *("os:system", "builtins:eval", "subprocess:Popen", "enum:Enum", "enum:Flag", "enum:IntFlag"),
            *("antigravity:x", "this:x", "os:", ":", "", "builtins:tuple", "signal:Signals", "re:RegexFlag"),
            *("collections:OrderedDict", "hvdrecover.checkpoint.arena:Arena", "typing:NamedTuple", "x.y:z"),
            *("hvdrecover.checkpoint.snapshot:Snapshot", "hvdrecover.config:Config", "builtins:type"),
        ]
    ),
    ANYTHING,
)
PARTS = st.one_of(
    st.sampled_from(["TRAIN", "READ|WRITE", "READ|8", "0", "-1", "9" * 5000, "|", "__class__", "mro", "x"]),
    ANYTHING,
)
TIMES = st.tuples(
    st.one_of(
        st.sampled_from(["2024-02-30", "2024-01-01T00:00:00", "01:02:03", "9999-12-31T23:59:59"]), ANYTHING
    ),
    st.one_of(
        st.sampled_from([None, "UTC", "../../etc/passwd", "/etc/passwd", "Europe", "", "a\0b", "x" * 5000]),
        ANYTHING,
    ),
    st.one_of(st.sampled_from([0, 1, 2, -1]), ANYTHING),
).map(list)


ANY_TAG = st.sampled_from(TAGS)


def tagged(inner, tags=ANY_TAG):
    """Values of some kinds, with what belongs there, nearly belongs there, or does not."""
    fields = st.dictionaries(
        st.sampled_from(["rate", "steps", "x", "__class__", "__dict__"]), inner, max_size=3
    )
    pairs = st.lists(st.lists(inner, min_size=1, max_size=3), max_size=3)
    known = {
        "$numpy": NUMPY,
        "$enum": st.tuples(CLASS_NAMES, PARTS).map(list),
        "$namedtuple": st.tuples(CLASS_NAMES, st.lists(inner, max_size=3)).map(list),
        "$dataclass": st.tuples(CLASS_NAMES, st.one_of(fields, inner), st.one_of(fields, inner)).map(list),
        "$datetime": TIMES,
        "$time": TIMES,
        "$deque": st.tuples(st.lists(inner, max_size=3), SCALARS).map(list),
        "$dict": pairs,
        "$ordereddict": pairs,
        "$counter": pairs,
        "$timedelta": st.lists(SCALARS, max_size=8),
        "$complex": st.lists(SCALARS, max_size=3),
    }
    return tags.flatmap(
        lambda tag: st.one_of(known.get(tag, inner), inner, ANYTHING).map(lambda payload: {tag: payload})
    )


TREES = st.recursive(
    st.one_of(SCALARS, st.just({"$tensor": "weight"}), tagged(SCALARS)),
    lambda inner: st.one_of(
        tagged(inner),
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["weight", "$set", "a", ""]), inner, max_size=3),
    ),
    max_leaves=8,
)
ATTRIBUTES = st.sampled_from(["model", "step", "sampler", "x"])
CURSORS = st.one_of(
    st.fixed_dictionaries({"epoch": SCALARS, "processed_num": SCALARS}, optional={"length": SCALARS}),
    ANYTHING,
)
STATES = st.one_of(
    st.fixed_dictionaries(
        {
            "attributes": st.dictionaries(ATTRIBUTES, TREES, max_size=3),
            "samplers": st.dictionaries(ATTRIBUTES, CURSORS, max_size=2),
        }
    ),
    st.fixed_dictionaries({"attributes": st.one_of(TREES, ANYTHING), "samplers": ANYTHING}),
    st.dictionaries(st.text(max_size=3), ANYTHING, max_size=2),
)
WEIGHT = safetensors({"weight": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}, bytes(16))


@cases(350)
@example(
    state={
        "attributes": {"sampler": [], "model": {"$numpy": ["|b1", [0], "", False]}},
        "samplers": {"sampler": "", "model": {}},
    },
    strict=False,
)
@given(state=STATES, strict=st.booleans())
@example(
    state={"attributes": {"model": {"$numpy": ["<U0", [10**8], "", False]}}, "samplers": {}}, strict=True
)
def test_a_state_made_to_do_harm_is_refused_or_harmless(roots, state, strict):
    files = {"model.safetensors": WEIGHT}
    try:
        manifest = signed(json.dumps(valid_fields(files, state)))
    except (ValueError, RecursionError):
        assume(False)
    root = write(roots, manifest, files)
    snapshot = read(root)
    if snapshot is not None:
        load(snapshot, root, strict=strict)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("levels", [90, 300, 480, 900])
def test_a_state_of_any_depth_is_refused_or_harmless(roots, levels, kind):
    files = {"model.safetensors": WEIGHT}
    state = {"attributes": {"model": deep(levels, kind)}, "samplers": {"sampler": deep(levels, kind)}}
    root = write(roots, signed(json.dumps(valid_fields(files, state))), files)
    snapshot = read(root)
    if snapshot is not None:
        load(snapshot, root, strict=True)


@pytest.mark.parametrize("tag", TAGS)
@cases(25)
@given(data=st.data())
def test_a_value_of_any_kind_made_to_do_harm_is_a_value_error_or_harmless(tag, data):
    value = data.draw(tagged(TREES, st.just(tag)))
    with watched(TEMPORARY), contextlib.suppress(ValueError):
        values.decode(value)


ACCESS, _, POINT, SCHEDULE = CLASSES


@pytest.mark.parametrize(
    "value",
    [
        {"$numpy": ["<U0", [10**8], "", False]},
        {"$numpy": ["|S0", [2**62], "", False]},
        {"$numpy": ["<U1", [], "/////w==", True]},
        {"$numpy": ["|S2147483647", [1], "", False]},
        {"$numpy": ["<f4", [2**32, 2**32], "", False]},
        {"$numpy": ["<f4", [-1, -1], "AAAAPw==", False]},
        {"$numpy": ["<f4", ["a", 10**12], "", False]},
        {"$numpy": ["<f4", 1, "AAAAPw==", False]},
        {"$numpy": ["|O", [], "AAAAAAAAAAA=", True]},
        {"$numpy": ["<M8[99999999999s]", [], "AAAAAAAAAAA=", True]},
        {"$datetime": ["2024-01-01", "../../../etc/passwd", 0]},
        {"$datetime": ["2024-01-01", "/etc/passwd", 0]},
        {"$enum": ["os:system", "x"]},
        {"$enum": [ACCESS, "9" * 5000]},
        {"$enum": ["enum:Flag", "1"]},
        {"$enum": [SCHEDULE, "rate"]},
        {"$namedtuple": ["builtins:tuple", [1]]},
        {"$namedtuple": [POINT, [1]]},
        {"$dataclass": ["antigravity:x", {}, {}]},
        {"$dataclass": [POINT, {}, {}]},
        {"$dataclass": [SCHEDULE, {"rate": 1, "steps": [], "__class__": 1}, {}]},
        {"$set": [{"$dataclass": [SCHEDULE, {"rate": 1, "steps": []}, {}]}]},
        {"$dict": [[[1], 2]]},
        {"$deque": [[1], 2**70]},
        {"$timedelta": [math.nan]},
        {"$timedelta": [10**10]},
        {"$float": 10**400},
        {"$int": "0x"},
        {"$tensor": "x"},
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_value_that_can_not_be_is_a_value_error(value):
    with watched(TEMPORARY), pytest.raises(ValueError):
        values.decode(value)


# -- damage ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a real commit."""
    root = tmp_path_factory.mktemp("whole")
    store = make_store(LocalStorage(root))
    store.claim_next()
    store.write(make_snapshot(*_numbers_of(ID)), rank=0)
    return {path.name: path.read_bytes() for path in (root / ID.name).iterdir()}


def _numbers_of(commit):
    return commit.generation, commit.commit


@cases(200)
@given(choice=st.data())
def test_a_commit_with_a_flipped_bit_or_a_lost_end_is_refused(roots, whole, choice):
    files = dict(whole)
    name = choice.draw(st.sampled_from(sorted(files)))
    data = bytearray(files[name])
    position = choice.draw(st.integers(0, len(data) - 1))
    match choice.draw(st.sampled_from(["flip", "flip", "cut", "zero", "repeat"])):
        case "flip":
            data[position] ^= 1 << choice.draw(st.integers(0, 7))
        case "cut":
            del data[position:]
        case "zero":
            data[position:] = bytes(len(data) - position)
        case "repeat":
            data[position:position] = data[position : position + 10]
    assume(bytes(data) != files[name])
    files[name] = bytes(data)
    manifest = files.pop(FILE_NAME)
    assert read(write(roots, manifest, files)) is None


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


def test_a_claim_of_a_terabyte_is_nobodys_and_takes_no_memory(tmp_path):
    root, store = root_with_a_commit(tmp_path)
    with (root / "claims" / "g0001.json").open("wb") as file:
        file.truncate(1 << 40)
    assert store.claims.read(1).job == ""


def test_a_claim_that_is_a_pipe_does_not_hang(tmp_path):
    root, store = root_with_a_commit(tmp_path)
    (root / "claims" / "g0001.json").unlink()
    os.mkfifo(root / "claims" / "g0001.json")
    assert store.claims.read(1).job == ""


@pytest.mark.parametrize("name", [FILE_NAME, "model.safetensors"])
def test_a_file_that_is_a_pipe_does_not_hang(tmp_path, name):
    root, _ = root_with_a_commit(tmp_path)
    (root / ID.name / name).unlink()
    os.mkfifo(root / ID.name / name)
    assert read(root) is None


@pytest.mark.parametrize("header", [True, False], ids=["with a header", "without"])
def test_a_data_file_larger_than_memory_is_an_error(tmp_path, header):
    size = 1 << 40
    start = safetensors({"x": {"dtype": "U8", "shape": [size - 128], "data_offsets": [0, size - 128]}})
    assert len(start) == 128
    fields = valid_fields({})
    fields["files"] = [{"name": "model.safetensors", "size": size, "digest": "0" * 32}]
    root = write(tmp_path, signed(json.dumps(fields)), {"model.safetensors": start if header else b""})
    os.truncate(root / ID.name / "model.safetensors", size)
    with pytest.raises(StorageError if header else CorruptCheckpointError):
        read_commit(LocalStorage(root), ID)


@pytest.fixture
def outside(tmp_path):
    """A folder that is none of ours, and looks like a commit."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in (FILE_NAME, "model.safetensors", "QUARANTINE.json", "g0001.json"):
        (folder / name).write_bytes(b"theirs")
    yield folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(
        (FILE_NAME, "model.safetensors", "QUARANTINE.json", "g0001.json"), b"theirs"
    )


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


def test_a_half_written_commit_folder_that_is_a_link_is_not_deleted_through(tmp_path, outside):
    root, _ = root_with_a_commit(tmp_path)
    half = tmp_path / "half"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"theirs")
    (root / "g0001-c00000001").symlink_to(half)
    make_store(LocalStorage(root)).claim_next()
    assert (half / "model.safetensors").read_bytes() == b"theirs"


def test_files_that_are_links_are_replaced_and_not_written_through(tmp_path, outside):
    root, store = root_with_a_commit(tmp_path)
    folder = root / "g0001-c00000003"
    folder.mkdir()
    for name in (FILE_NAME, "model.safetensors", "QUARANTINE.json"):
        (folder / name).symlink_to(outside / name)
    with pytest.raises(StorageError):  # a data file is not replaced by a rename, so the link is refused
        store.write(make_snapshot(1, 3), rank=0)
    (folder / "model.safetensors").unlink()
    store.write(make_snapshot(1, 3), rank=0)
    assert not (folder / FILE_NAME).is_symlink()


def test_claims_that_are_a_link_are_not_written_through(tmp_path, outside):
    root = tmp_path / "root"
    root.mkdir()
    (root / "claims").symlink_to(outside)
    with pytest.raises(StorageError, match="symbolic link"):
        make_store(LocalStorage(root)).claim_next()
