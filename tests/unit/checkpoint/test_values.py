import collections
import dataclasses
import datetime
import enum
import json
import math
import sys
import types
import zoneinfo

import numpy as np
import pytest

from hvdrecover.checkpoint.values import decode, encode
from hvdrecover.errors import UnsupportedValueError
from tests.unit.checkpoint import golden
from tests.unit.checkpoint.golden import Phase, Point, Schedule, same


class Alias(enum.Enum):
    TRAIN = "train"
    LEARN = "train"


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


Odd = enum.Enum("Odd", {"a|b": 1, "name_": 2})


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int
    b: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FrozenOfOneTest(Frozen):
    """As `Busy`."""


@dataclasses.dataclass
class Busy:
    """Of one test: its ``__new__`` is replaced, which Python does not wholly take back."""

    value: int

    def __post_init__(self):
        self.double = 2 * self.value


@dataclasses.dataclass
class Unset:
    later: int = dataclasses.field(init=False)


@dataclasses.dataclass
class IsAList(list):
    name: str = "x"


class Custom:
    pass


def round_trip(value):
    return decode(json.loads(json.dumps(encode(value, "state.x"), allow_nan=False)))


BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
PLAIN = [
    *golden.OBJECTS.values(),
    True,
    0,
    10**5000,
    -math.inf,
    math.nan,
    complex(math.inf, -math.inf),
    "\ud800",
    {1: "a", None: "b", (1, 2): "c", 2.5: "d", False: 0},
    {"$tuple": [1]},
    {b"k": {frozenset({1}): 2}},
    datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, seconds=7))),
    datetime.time(1, tzinfo=BERLIN),
    Alias.LEARN,
    Level.LOW,
    Mode.FAST,
    Bits(0),
    Bits(1 | 8),
    Odd["a|b"],
    Point(1, Point(2, [3])),
    Pair("l", (1,)),
    Schedule(0.1, [1, (2,), Frozen("f")]),
    Slotted(1, (2, 3)),
]
ARRAYS = [
    *(np.arange(6).reshape(2, 3).astype(dtype) for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    *(np.array([1.5, -0.0, np.nan, np.inf]).astype(dtype) for dtype in ("f2", "f4", "f8", "c8", "c16")),
    np.array([1, 2], dtype=">i4"),
    np.array(3),
    np.zeros((0, 3), dtype="f4"),
    np.array(["a", "", "ünï"]),
    np.array(["2024-01-02", "NaT"], dtype="M8[D]"),
    np.array(["2024-01-02T03:04:05"], dtype=">M8[25s]"),
    np.array([1, 2], dtype="m8[ns]"),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.broadcast_to(np.arange(3), (2, 3)),
    np.bool_(True),
    np.float64(0.1),
    np.str_(""),
    np.bytes_(b"x"),
    np.datetime64("2024-01-02", "D"),
]


@pytest.mark.parametrize("value", [*PLAIN, *ARRAYS], ids=lambda value: type(value).__name__)
def test_a_value_comes_back_equal_and_of_its_type(value):
    """Arrays bit for bit."""
    assert same(round_trip(value), value)


def test_a_zone_comes_back_with_its_rules_and_fold():
    early = datetime.datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN)
    late = early.replace(fold=1)
    assert [round_trip(moment).utcoffset() for moment in (early, late)] == [
        datetime.timedelta(hours=2),
        datetime.timedelta(hours=1),
    ]
    assert round_trip(late).fold == 1
    assert round_trip(early).tzinfo is BERLIN
    assert round_trip(datetime.time(1, fold=1, tzinfo=BERLIN)).tzinfo is BERLIN


def test_containers_are_fresh_and_arrays_writable():
    inner, array = [1], np.arange(3)
    value = {"a": inner, "b": inner, "c": array}
    copy = round_trip(value)
    copy["a"].append(2)
    copy["c"][0] = 7
    assert (inner, copy["b"], array[0]) == ([1], [1], 0)


@pytest.mark.parametrize(
    ("fields", "facts"),
    [({"steps": []}, "'rate', .*default"), ({"rate": 0.5, "steps": [], "momentum": 0.9}, "'momentum'")],
)
def test_a_field_that_is_missing_or_that_the_class_no_longer_has_is_named(fields, facts):
    encoded = encode(Schedule(0.5, []), "x")
    encoded["$dataclass"][1] = fields
    with pytest.raises(ValueError, match=f"Schedule .*{facts}"):
        decode(encoded)


def a_list_in_itself():
    value = [1]
    value.append({"deep": value})
    return value


def local_class():
    class Local(enum.Enum):
        A = 1

    return Local.A


def deep(levels):
    value = []
    for _ in range(levels):
        value = (value,)
    return value


class SomewhereElse(datetime.tzinfo):
    def utcoffset(self, moment):
        return datetime.timedelta(0)


class MyList(list):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 0, "function"),
        (types, "module"),
        (Custom, "type"),
        (Custom(), "Custom"),
        (MyList(), "MyList"),
        (np.array([None, 1]), "dtype object"),
        (np.array([(1, 2)], dtype="i4,i4"), "dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (collections.defaultdict(list), "defaultdict"),
        (a_list_in_itself(), "contains itself"),
        (local_class(), "local_class.<locals>"),
        (Unset(), "later"),
        (IsAList(), "IsAList"),
        (datetime.datetime(2024, 1, 1, tzinfo=SomewhereElse()), "time zone"),
        (deep(200), "deep"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_named_with_a_remedy(value, kind):
    with pytest.raises(UnsupportedValueError) as caught:
        encode({"a": [0, value]}, "state.config")
    assert caught.value.path.startswith("state.config['a'][1]")
    assert kind in str(caught.value)
    assert any(word in str(caught.value) for word in ("state_dict()", "zoneinfo", "module", "default"))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": object()}}, "['a']['b']"),
        ({(1, 2): [object()]}, "[(1, 2)][0]"),
        ((0, object()), "[1]"),
        (collections.deque([1, object()]), "[1]"),
        (collections.OrderedDict(a=object()), "['a']"),
        (Schedule(0.1, [0, object()]), ".steps[1]"),
        (Point(1, object()), "[1]"),
    ],
)
def test_the_path_leads_to_the_culprit(value, path):
    with pytest.raises(UnsupportedValueError, match=r": a builtins\.object ") as caught:
        encode(value, "state.history")
    assert caught.value.path == f"state.history{path}"


HERE, GOLDEN = __name__, golden.__name__
HOSTILE = [
    {"$float": "one"},
    {"$int": 5},
    {"$bytes": "!!!"},
    {"$tuple": "abc"},
    {"$set": [[1]]},
    {"$deque": [[1], "x"]},
    {"$dict": [[[], 1]]},
    {"$time": ["25:00", None, 0]},
    {"$datetime": ["2024-01-01", "../../etc/passwd", 0]},
    {"$enum": [f"{GOLDEN}:Phase", "NONE"]},
    {"$enum": [f"{GOLDEN}:Access", "READ|NONE"]},
    {"$enum": [f"{GOLDEN}:Schedule", "A"]},
    {"$enum": ["os:system", "ls"]},
    {"$enum": [f"{HERE}:HERE.upper", "A"]},
    {"$dataclass": [f"{HERE}:Custom", {}, {}]},
    {"$dataclass": [f"{GOLDEN}:Schedule", {}, {}]},
    {"$dataclass": [f"{HERE}:Slotted", {"a": 1, "b": 2}, {"c": 3}]},
    {"$namedtuple": [f"{GOLDEN}:Point", [1, 2, 3]]},
    {"$namedtuple": ["builtins:tuple", [1]]},
    {"$numpy": ["O", [1], "AAAAAAAAAAA=", False]},
    {"$numpy": ["i4,(", [1], "AAAAAA==", False]},
    {"$numpy": ["<f4", [2], "AAAAAA==", False]},
    {"$numpy": ["<f4", [-1], "AAAAAA==", False]},
    {"$numpy": ["<f4", [2**62, 2**62], "AAAAAA==", False]},
    {"$numpy": ["<M8[parsec]", [1], "AAAAAAAAAAA=", False]},
    {"$tuple": [1], "other": 2},
]


@pytest.mark.parametrize("payload", HOSTILE, ids=lambda payload: json.dumps(payload)[:60])
def test_a_hostile_payload_gives_a_value_error(payload):
    with pytest.raises(ValueError):
        decode({"a": [payload]})


def test_deep_nesting_gives_a_value_error():
    value = 1
    for _ in range(100_000):
        value = [value]
    with pytest.raises(ValueError, match="nested"):
        decode(value)


def test_decoding_wakes_no_lazy_module(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"touched {name}")

    module = Lazy("lazy_module_of_a_test")
    module_with_getattr = types.ModuleType("getattr_module_of_a_test")
    module_with_getattr.__getattr__ = lambda name: Phase
    monkeypatch.setitem(sys.modules, "lazy_module_of_a_test", module)
    monkeypatch.setitem(sys.modules, "getattr_module_of_a_test", module_with_getattr)
    for name in ("lazy_module_of_a_test", "getattr_module_of_a_test"):
        with pytest.raises(ValueError, match=f"{name}:Phase"):
            decode({"$enum": [f"{name}:Phase", "TRAIN"]})


def test_decoding_calls_no_constructor(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("called")

    values = [Busy(1), FrozenOfOneTest("x"), Point(1, 2), Phase.TRAIN]
    encoded = json.loads(json.dumps(encode(values, "x")))
    for kind in (Busy, FrozenOfOneTest, Point):
        monkeypatch.setattr(kind, "__new__", forbidden)
    for kind in (Busy, FrozenOfOneTest):
        monkeypatch.setattr(kind, "__init__", forbidden)
        monkeypatch.setattr(kind, "__post_init__", forbidden, raising=False)
    monkeypatch.setattr(Phase, "_missing_", forbidden)
    busy, frozen, point, phase = decode(encoded)
    assert (busy.value, busy.double, frozen.name, point.x, phase) == (1, 2, "x", 1, Phase.TRAIN)
