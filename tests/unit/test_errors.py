import inspect
import pickle
import re
from pathlib import Path

import pytest

from hvdrecover import errors
from hvdrecover.checkpoint import Checkpoint, CommitId, Keep, manifest
from hvdrecover.checkpoint.values import encode
from hvdrecover.data.order import SampleOrder
from hvdrecover.discovery import lists
from hvdrecover.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    FlushTimeoutError,
    HvdrecoverError,
    MismatchError,
    NoProgressError,
    NoUsableCommitError,
    StorageError,
    UnsupportedValueError,
)
from tests.unit import sentences

EXAMPLES = [
    ConfigError("keep", "0 is less than 1"),
    UnsupportedValueError("state.history[3]", "a lambda"),
    StorageError("file:///data", "the disk is full"),
    FencedError("file:///data", "generation 4 has claimed it"),
    FlushTimeoutError("file:///data", "not durable after 3 s"),
    NoUsableCommitError("file:///data", {"g0001-c00000001": "truncated"}),
    MismatchError("file:///data", ["model.weight: F32[2], not F32[3]"]),
    NoProgressError("no progress", commit=3, rank=0),
    NoProgressError("no progress", commit=3),
]


def test_each_class_stands_once_in_the_troubleshooting_page():
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", page, re.MULTILINE)
    classes = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
    ours = {name for name, kind in classes.items() if issubclass(kind, HvdrecoverError)}
    assert sorted(rows) == sorted(ours - {"HvdrecoverError"})


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_to_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_errors_can_be_caught_as_their_builtin_kind():
    assert issubclass(StorageError, OSError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(UnsupportedValueError, TypeError)
    assert issubclass(FlushTimeoutError, TimeoutError)
    assert issubclass(StorageError, CheckpointError)


def test_the_golden_file_has_what_errors_say():
    assert sentences.GOLDEN.read_text() == sentences.golden(), "see the golden file's head"


@pytest.mark.parametrize(
    "fail",
    [
        lambda: Keep(last=0),
        lambda: Checkpoint("root", near=""),
        lambda: encode([object()], "state.log"),
        lambda: lists.parse("a\na", "hosts"),
        lambda: manifest.loads(b"{}", "file:///data", CommitId(1, 1)),
        lambda: SampleOrder(3).load_state_dict(SampleOrder(4).state_dict()),
    ],
)
def test_what_an_error_says_when_it_is_raised_stands_in_the_golden_file(fail):
    with pytest.raises(HvdrecoverError) as caught:
        fail()
    assert sentences.stands(caught.value)
