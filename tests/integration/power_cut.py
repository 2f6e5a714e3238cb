"""A model of a disk whose power may fail: what has not been fsynced may be lost, and may be there.

Content that was not fsynced may be missing, stale or torn; an entry of a folder that was not fsynced may be
as before or as after, each by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.integration.system_calls import Step

Survives = Literal["nothing", "names", "some"]
"""Of what was not fsynced: nothing, all names without their content, or some of each."""


@dataclass
class File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    """The contents of a root in memory and on the disk.

    Args:
        root: a folder to start with, all of it durable.
    """

    def __init__(self, root: Path) -> None:
        self._root = _load(root)

    def apply(self, step: Step) -> None:
        """Do what one system call does."""
        folder, name = self._parent(step.path)
        match step.verb:
            case "open":
                assert isinstance(folder.now.setdefault(name, File()), File)
            case "mkdir":
                folder.now[name] = Folder()
            case "unlink" | "rmdir":
                del folder.now[name]
            case "link" | "rename" | "replace":
                target, new = self._parent(step.to)
                target.now[new] = folder.now[name] if step.verb == "link" else folder.now.pop(name)
            case "fsync":
                node = self._node(step.path)
                if isinstance(node, File):
                    node.durable = bytes(node.now)
                else:
                    node.durable = dict(node.now)
            case "ftruncate" | "write":
                node = self._node(step.path)
                assert isinstance(node, File)
                end = step.start + len(step.data)
                node.now.extend(bytes(max(0, end - len(node.now))))
                if step.verb == "write":
                    node.now[step.start : end] = step.data
                else:
                    del node.now[end:]
            case _:
                raise AssertionError(f"the model knows no {step.verb}")

    def power_fails(self, into: Path, survives: Survives, dice: random.Random) -> None:
        """Make the folder that is found when the power is back."""
        _restore(self._root, into, survives, dice)

    def content(self) -> dict[str, bytes]:
        """Every file as the running system sees it."""
        found: dict[str, bytes] = {}

        def walk(folder: Folder, path: str) -> None:
            for name, node in folder.now.items():
                if isinstance(node, Folder):
                    walk(node, f"{path}{name}/")
                else:
                    found[path + name] = bytes(node.now)

        walk(self._root, "")
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        node = self._node(folder or ".")
        assert isinstance(node, Folder)
        return node, name

    def _node(self, path: str) -> File | Folder:
        node: File | Folder = self._root
        for part in Path(path).parts:
            assert isinstance(node, Folder)
            node = node.now[part]
        return node


def _load(path: Path) -> Folder:
    entries: dict[str, File | Folder] = {}
    for entry in path.iterdir():
        content = b"" if entry.is_dir() else entry.read_bytes()
        entries[entry.name] = _load(entry) if entry.is_dir() else File(bytearray(content), content)
    return Folder(entries, dict(entries))


def _restore(folder: Folder, into: Path, survives: Survives, dice: random.Random) -> None:
    into.mkdir()
    for name in sorted({*folder.now, *folder.durable}):
        entries = folder.durable if survives == "nothing" else folder.now
        if survives == "some":
            entries = dice.choice([folder.durable, folder.now])
        node = entries.get(name)
        if isinstance(node, Folder):
            _restore(node, into / name, survives, dice)
        elif node is not None:
            (into / name).write_bytes(_content(node, survives, dice))


def _content(file: File, survives: Survives, dice: random.Random) -> bytes:
    if survives != "some" or file.now == file.durable:
        return file.durable
    torn = dice.randrange(len(file.now) + 1)
    return dice.choice([file.durable, bytes(file.now), bytes(file.now[:torn]).ljust(len(file.now), b"\0")])
