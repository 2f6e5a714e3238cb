from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover import error_kinds, errors
from hvdrecover.launch import ends

DOCS = Path(__file__).parents[3] / "docs" / "launching.md"


def test_the_docs_have_the_table_that_decides() -> None:
    assert ends.table() in DOCS.read_text()


def test_errors_of_the_table_are_ours_and_stand_in_one_row() -> None:
    named = [error for end in ends.OF_PROCESSES for error in end.errors]
    assert len(named) == len(set(named))
    assert all(issubclass(getattr(errors, name), errors.HvdrecoverError) for name in named)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (errors.OvertakenError("u", "p"), "overtaken"),
        (errors.FencedError("u", "p"), "fenced"),
        (errors.DurableAgeError("u", "p"), "too_old"),
        (errors.StorageError("u", "p"), "storage"),
        (errors.NoUsableCommitError("u", {}), "unusable"),
        (errors.UnsupportedValueError("state.x", "p"), "wrong"),
        (errors.RendezvousError("p"), "rendezvous"),
        (errors.NoProgressError("p", commit=1), "no_progress"),
        (errors.StoppedError("p", "FencedError"), "fenced"),
        (errors.StoppedError("p", "StorageError"), "storage"),
        (errors.StoppedError("p", "ValueError"), "rendezvous"),
        (errors.DivergedError("p", [], "r"), "script_error"),
        (ValueError("p"), "script_error"),
    ],
)
def test_how_an_error_ends_a_process(error: BaseException, name: str) -> None:
    assert ends.of_error(error_kinds.kinds(error), first=False).name == name


def test_what_a_storage_has_raised_counts_as_well() -> None:
    error = errors.StorageError("root", "no")
    error.__cause__ = FileNotFoundError(2, "there is none")
    assert {"StorageError", "FileNotFoundError"} <= set(error_kinds.kinds(error))
    assert "NoneType" not in error_kinds.kinds(errors.StorageError("root", "no"))


def test_every_class_of_errors_has_a_number_and_back() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    ours = [each for each in classes if issubclass(each, errors.HvdrecoverError)]
    found = {error_kinds.number(each.__new__(each)) for each in ours}
    assert found == set(range(1, len(ours) + 1))
    assert error_kinds.number(None) == 0
    assert error_kinds.name(error_kinds.number(errors.FencedError("u", "p"))) == "FencedError"
