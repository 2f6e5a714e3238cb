"""The changes to Horovod's source that make it build and behave, each with its name and its reason.

An edit replaces one text by another. It must find its text exactly once: a Horovod source in which it doesn't
is not the one that the edit was written for, and is left alone.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from pathlib import Path

from hvdrecover.errors import EditError
from hvdrecover.install.edits.edit import Edit
from hvdrecover.install.edits.launcher import LAUNCHER
from hvdrecover.install.edits.lost_peer import LOST_PEER
from hvdrecover.install.edits.native import NATIVE
from hvdrecover.install.edits.rendezvous import RENDEZVOUS
from hvdrecover.install.edits.shutdown import SHUTDOWN
from hvdrecover.install.edits.tensorflow_ops import TENSORFLOW_OPS
from hvdrecover.install.edits.torch_wait import TORCH_WAIT

__all__ = ["EDITS", "Edit", "apply", "diff", "digest"]

EDITS = (*NATIVE, *SHUTDOWN, *LOST_PEER, *TORCH_WAIT, *TENSORFLOW_OPS, *LAUNCHER, *RENDEZVOUS)


def digest(edits: Iterable[Edit]) -> str:
    """Return a hex digest of what the edits do; names and reasons don't count."""
    parts = [part for edit in edits for part in (edit.file, edit.old, edit.until, edit.new)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def apply(edits: Iterable[Edit], source_dir: Path) -> None:
    """Apply edits, in order, to a source tree: all of them, or none.

    Each changed file says so in its first line.

    Args:
        edits: what to change.
        source_dir: the root of the source tree.

    Raises:
        EditError: the text of an edit does not occur exactly once; no file was changed.
    """
    for file, (_, after) in _edited(edits, source_dir).items():
        (source_dir / file).write_bytes(after.encode())


def diff(edits: Iterable[Edit], source_dir: Path) -> str:
    """Return what `apply` would change, as a unified diff.

    Args:
        edits: what to change.
        source_dir: the root of the source tree.

    Raises:
        EditError: the text of an edit does not occur exactly once.
    """
    lines: list[str] = []
    for file, (before, after) in sorted(_edited(edits, source_dir).items()):
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, f"a/{file}", f"b/{file}")
    return "".join(lines)


def _edited(edits: Iterable[Edit], source_dir: Path) -> dict[str, tuple[str, str]]:
    """The text of each file, before and after the edits."""
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
