"""The changes to Horovod's source: what `horovod.edits` says, applied to a source tree.

`horovod.edits` reads like a diff without line numbers. A comment tells the reason of the edits below it::

    # GCC 13 and later do not include <string> by other headers.
    @@ NAME path/of/the/file
     a line that stays
    -a line that goes
    +a line that is added
    ~all lines up to this one go, and this one stays
    \\

A backslash says that the line before it has no line end: the edit changes a part of a line. The lines that
stay and go must occur exactly once in the file. If they do not, Horovod's source is not the one that the edit
was written for, and no file is changed.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import InstallError


@dataclass(frozen=True)
class Edit:
    name: str
    file: str  # relative to the root of the source tree
    old: str  # the text to replace; it must occur exactly once
    new: str
    until: str = ""  # if given, all text before the next occurrence of this one is replaced as well


def parse(text: str) -> tuple[Edit, ...]:
    edits = []
    for block in text.split("\n@@ ")[1:]:
        head, *lines = block.split("\n")
        lines = lines[: next((i for i, line in enumerate(lines) if line.startswith("#")), len(lines))]
        while lines[-1] == "":  # empty lines separate edits
            lines.pop()
        parts = {"-": "", "+": "", "~": ""}
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            mark, rest = line[:1] or " ", line[1:]
            if mark == "\\":
                continue
            for part in "-+" if mark == " " else mark:
                parts[part] += rest if following == "\\" else f"{rest}\n"
        name, file = head.split(" ")
        edits.append(Edit(name, file, parts["-"], parts["+"], parts["~"]))
    return tuple(edits)


EDITS = parse(Path(__file__).with_name("horovod.edits").read_text())


def digest(edits: Iterable[Edit]) -> str:
    parts = [part for edit in edits for part in (edit.file, edit.old, edit.until, edit.new)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def apply(edits: Iterable[Edit], source_dir: Path) -> None:
    """Apply edits, in order, to a source tree: all of them, or none if one does not apply."""
    for file, (_, after) in _edited(edits, source_dir).items():
        (source_dir / file).write_bytes(after.encode())


def diff(edits: Iterable[Edit], source_dir: Path) -> str:
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
            raise InstallError(
                f"edit '{edit.name}' no longer applies: its text occurs {found} times in {edit.file}, and "
                "must occur once: this is not the Horovod version that hvdrecover was written for."
            )
        texts[edit.file] = before, text[:start] + edit.new + text[end:]
    return texts
