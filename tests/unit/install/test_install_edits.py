"""The edits of Horovod's source: all of them or none."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import cli
from hvdrecover.errors import InstallError
from hvdrecover.install.edits import EDITS, Edit, apply, diff

ONE = Edit("one", "a.txt", "old one", "new one")
TWO = Edit("two", "sub/b.txt", "old two", "new two")


def write_tree(root: Path, edits: tuple[Edit, ...]) -> None:
    """Make a source tree that holds the old text of every edit, between other lines."""
    for edit in edits:
        path = root / edit.file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{edit.old}{edit.until}\nafter\n")


def read_tree(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("file", "comment"), [("a.py", "#"), ("CMakeLists.txt", "#"), ("a.cc", "//")])
def test_nothing_but_the_text_changes_and_the_first_line_says_that_it_did(
    tmp_path: Path, file: str, comment: str
) -> None:
    (tmp_path / file).write_bytes("é\r\nold one\nrest".encode())
    apply([dataclasses.replace(ONE, file=file)], tmp_path)
    first, rest = (tmp_path / file).read_bytes().split(b"\n", 1)
    assert first.startswith(f"{comment} Changed by hvdrecover".encode())
    assert rest == "é\r\nnew one\nrest".encode()


def test_an_edit_that_does_not_apply_names_itself_and_changes_nothing(tmp_path: Path) -> None:
    write_tree(tmp_path, (ONE,))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("something else")
    before = read_tree(tmp_path)
    with pytest.raises(InstallError, match=r"two.* 0 .*sub/b\.txt"):
        apply([ONE, TWO], tmp_path)
    assert read_tree(tmp_path) == before
    write_tree(tmp_path, (ONE,))
    with pytest.raises(InstallError, match=r" 2 .*a\.txt"):
        apply([ONE], tmp_path)


def test_the_command_prints_the_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tree(tmp_path, EDITS)
    monkeypatch.setattr("hvdrecover.install.horovod.fetch", lambda runner, work, environ: tmp_path)
    before = read_tree(tmp_path)
    assert cli.main(["install-horovod", "--diff"]) == 0
    assert capsys.readouterr().out == diff(EDITS, tmp_path)
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize(
    ("errors", "seconds", "attempts"),
    [
        (["the round is over"] * 3000, "600", 3001),  # more than Python recurses
        (["the round is over"] * 3, "-1", 1),
        (["reset by peer"] * 9, "600", 4),
        (["h1[0] has been removed"], "600", 1),
    ],
)
def test_an_initialization_tries_round_after_round_until_its_deadline(
    errors: list[str], seconds: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", seconds)
    (edit,) = (edit for edit in EDITS if edit.name == "next-round-tried")
    names: dict[str, Any] = {"os": os, "time": time}
    exec(f"class Basics:\n{edit.new}        pass\n", names)
    left, tried = list(errors), []
    basics = names["Basics"]()
    basics._initialization_error = lambda: left.pop(0)

    def attempt() -> bool:
        tried.append(len(left))
        return not left

    assert basics._initialize(attempt) is (attempts > len(errors))
    assert len(tried) == attempts
