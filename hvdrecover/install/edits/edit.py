"""An edit of Horovod's source: one text replaced by another.

An edit must find its text exactly once. Else the source is not the one that the edit was written for, and
stays as it is.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import EditError


@dataclass(frozen=True)
class Edit:
    """One named replacement in one file of Horovod's source; the reason is a comment beside it.

    Attributes:
        name: its name in messages.
        file: the file, relative to the root of the source tree.
        old: the text to replace; it must occur exactly once.
        new: the text that replaces it.
        until: if given, all text before the next occurrence of this one is replaced as well.
    """

    name: str
    file: str
    old: str
    new: str
    until: str = ""


def add_before(name: str, file: str, anchor: str, added: str) -> Edit:
    """Return an edit that adds a text before one that stays."""
    return Edit(name, file, anchor, added + anchor)


def add_after(name: str, file: str, anchor: str, added: str) -> Edit:
    """Return an edit that adds a text after one that stays."""
    return Edit(name, file, anchor, anchor + added)


def digest(edits: Iterable[Edit]) -> str:
    """Return a hex digest of the changes, without the names of the edits."""
    parts = [part for edit in edits for part in (edit.file, edit.old, edit.until, edit.new)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def apply(edits: Iterable[Edit], source_dir: Path) -> None:
    """Apply edits, in order, to a source tree: all of them, or none if one raises `EditError`.

    Each changed file says so in its first line.
    """
    for file, (_, after) in _edited(edits, source_dir).items():
        (source_dir / file).write_bytes(after.encode())


def diff(edits: Iterable[Edit], source_dir: Path) -> str:
    """Return what `apply` would change, as a unified diff."""
    lines: list[str] = []
    for file, (before, after) in sorted(_edited(edits, source_dir).items()):
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, f"a/{file}", f"b/{file}")
    return "".join(lines)


def _edited(edits: Iterable[Edit], source_dir: Path) -> dict[str, tuple[str, str]]:
    """Return the text of each file before and after the edits."""
    texts: dict[str, tuple[str, str]] = {}
    for edit in edits:
        path = source_dir / edit.file
        if edit.file not in texts:
            text = path.read_bytes().decode() if path.is_file() else ""
            comment = "//" if path.suffix in (".cc", ".h") else "#"
            texts[edit.file] = text, f"{comment} Changed by hvdrecover: see NOTICE-hvdrecover.diff.\n{text}"
        before, text = texts[edit.file]
        start = text.find(edit.old)
        end = text.find(edit.until, start + len(edit.old))
        found = text.count(edit.old) if end >= 0 else 0
        if found != 1:
            raise EditError(edit.name, edit.file, found)
        texts[edit.file] = before, text[:start] + edit.new + text[end:]
    return texts
