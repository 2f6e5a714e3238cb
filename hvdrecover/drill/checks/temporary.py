"""Do processes leave temporary files behind?

Those that are killed can't remove theirs, and nobody can tell from a file who made it. So processes write
down what they make (`hvdrecover.drill.temporary_files`), and only those that ended by themselves are held
to it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.differences import some
from hvdrecover.drill.checks.rules import Finding


@dataclass(frozen=True)
class Ended:
    """A process that ended by itself: what it did, its id, and the temporary files that it has left."""

    kind: str
    pid: int
    left: tuple[str, ...]


@dataclass(frozen=True)
class Left:
    """The files that are left below a folder: their number, and their bytes."""

    files: int = 0
    bytes: int = 0


def ended(folder: Path) -> list[Ended]:
    """The processes of a run that have made temporary files and ended by themselves; call it after the run.

    Args:
        folder: where they have written down what they made.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        text = path.read_text()
        made: list[str | None] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if None in made:
            left = tuple(sorted({each for each in made if each is not None and Path(each).exists()}))
            found.append(Ended(path.stem.partition("-")[0], int(path.stem.rpartition("-")[2]), left))
    return found


def leaks(clean: Sequence[Ended], drilled: Sequence[Ended]) -> list[Finding]:
    """No process that ends by itself leaves more temporary files than one of its kind does undisturbed.

    Args:
        clean: processes of the undisturbed run.
        drilled: processes of a run with faults.
    """
    usual: dict[str, int] = {}
    for each in clean:
        usual[each.kind] = max(usual.get(each.kind, 0), len(each.left))
    for each in drilled:
        if len(each.left) > (most := usual.get(each.kind, 0)):
            message = (
                f"the {each.kind} process {each.pid} was not killed, and has left {len(each.left)} temporary "
                f"files or folders ({some(each.left)}); undisturbed, one leaves {most or 'none'}"
            )
            return [Finding(rules.NO_TEMPORARY_FILES, message)]
    return []


def left(folder: Path) -> Left:
    """Return what is left below a folder."""
    sizes = [path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()]
    return Left(len(sizes), sum(sizes))
