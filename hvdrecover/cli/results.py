"""The results of the commands that look at a checkpoint root; ``docs/commands.md`` describes their JSON."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from hvdrecover.checkpoint.inspection import readable
from hvdrecover.checkpoint.inspection.catalog import Entry
from hvdrecover.checkpoint.inspection.compare import Difference
from hvdrecover.checkpoint.inspection.contents import Contents
from hvdrecover.checkpoint.inspection.prune import Plan
from hvdrecover.checkpoint.inspection.verify import Verdict
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.leftovers import Leftovers
from hvdrecover.checkpoint.near.place import NearRoot
from hvdrecover.checkpoint.storage import Temporary
from hvdrecover.cli.printer import Result, Shown, age, block, fact, rows, size
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.discovery.selection import Answer
from hvdrecover.reporting.words import counted

_STYLES = {
    "quarantined": "red",
    "suspect": "yellow",
    "broken": "red",
    "newer format": "red",
    "incomplete": "yellow",
    "unhealthy": "red",
    "cooldown": "yellow",
}
_OURS = ("horovod", "hvdrecover")


def state(name: str) -> Text:
    """Return the state of a commit or a host in its colour."""
    return Text(name, _STYLES.get(name, ""))


def _age(time: float) -> str:
    return age(SYSTEM_CLOCK.now() - time)


def ago(time: float) -> str:
    """Return how long ago a time was."""
    return f"{_age(time)} ago"


def _digests(intact: bool) -> Text:
    return Text("ok", "green") if intact else Text("broken", "red")


def _framework(versions: Mapping[str, str]) -> str:
    return _versions({name: version for name, version in versions.items() if name not in _OURS})


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _files(files: Sequence[Any]) -> str:
    return f"{counted(len(files), 'file')}, {size(sum(file.bytes for file in files))}"


# -- ls and verify -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """A commit of a root."""

    commit: str = fact("commit")
    generation: int
    number: int
    time: float | None = fact("age", _age, right=True)
    bytes: int = fact("size", size, right=True)
    world_size: int | None = fact("ranks", right=True)
    versions: Mapping[str, str] | None = fact("framework", _framework)
    state: str = fact("state", state)
    reason: str | None
    intact: bool | None = fact("digests", _digests, none="unchecked")
    problems: Mapping[str, str] | None

    @classmethod
    def of(cls, entry: Entry, verdict: Verdict | None = None) -> Commit:
        """Return a commit with the findings of `catalog` and `verify`."""
        manifest = entry.manifest
        return cls(
            commit=entry.id.name,
            generation=entry.id.generation,
            number=entry.id.commit,
            time=manifest.time if manifest else None,
            bytes=entry.nbytes,
            world_size=manifest.world_size if manifest else None,
            versions=manifest.versions if manifest else None,
            state=entry.state,
            reason=entry.reason,
            intact=verdict.intact if verdict else None,
            problems=verdict.problems if verdict else None,
        )


@dataclass(frozen=True)
class Aside:
    """A file of an unfinished write, for which no commit exists yet."""

    path: str
    bytes: int
    left_over: bool

    @classmethod
    def of(cls, files: Iterable[Temporary], *, left_over: bool) -> list[Aside]:
        """Return files of the storage."""
        return [cls(file.path, file.nbytes, left_over) for file in files]


@dataclass(frozen=True)
class Listing(Result):
    """The commits of a root, newest first."""

    root: str
    commits: list[Commit] = rows()
    leftovers: list[str]
    aside: list[Aside]

    @classmethod
    def of(
        cls, url: str, entries: Sequence[Entry], left: Leftovers, verdicts: Mapping[Any, Verdict]
    ) -> Listing:
        """Return the result of ``ls``."""
        return cls(
            root=url,
            commits=[Commit.of(entry, verdicts.get(entry.id)) for entry in entries],
            leftovers=[entry.id.name for entry in entries if entry.id in left.commits],
            aside=Aside.of(left.aside, left_over=True) + Aside.of(left.in_use, left_over=False),
        )

    def notes(self) -> Iterable[Shown]:
        """Return reasons, and the files that are not part of a complete commit."""
        if not self.commits:
            yield f"{self.root} holds no commits yet"
        for each in self.commits:
            if each.reason:
                yield f"{each.commit} is {each.state}: {each.reason}"
            for file, problem in (each.problems or {}).items():
                yield f"{each.commit} is broken: {file}: {problem}"
        begun = [each for each in self.commits if each.commit in self.leftovers]
        left = [each for each in self.aside if each.left_over]
        writing = [each for each in self.aside if not each.left_over]
        if begun:
            nbytes = size(sum(each.bytes for each in begun))
            yield f"incomplete, and no longer written: {counted(len(begun), 'commit')}, {nbytes}"
        if left:
            yield f"files of ended processes: {_files(left)}"
        if begun or left:
            yield "the next job deletes these before its first commit; prune deletes them now"
        if writing:
            yield f"being written: {_files(writing)}"


@dataclass(frozen=True)
class Verified:
    """A commit whose bytes were read."""

    commit: str = fact("commit")
    intact: bool = fact("digests", _digests)
    bytes: int = fact("read", size, right=True)
    problems: Mapping[str, str]


@dataclass(frozen=True)
class Verification(Result):
    """Whether commits are intact."""

    root: str
    intact: bool
    commits: list[Verified] = rows()

    @classmethod
    def of(cls, url: str, verdicts: Iterable[Verdict]) -> Verification:
        """Return the result of ``verify``."""
        found = [Verified(each.id.name, each.intact, each.nbytes, each.problems) for each in verdicts]
        return cls(url, all(each.intact for each in found), found)

    def notes(self) -> Iterable[Shown]:
        """Return the problems, and a summary."""
        for each in self.commits:
            yield from (f"{each.commit}: {file}: {problem}" for file, problem in each.problems.items())
        broken = sum(not each.intact for each in self.commits)
        yield f"{self.root}: {counted(len(self.commits), 'commit')} read, {broken or 'none'} broken"


# -- show and diff -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor of a commit."""

    name: str = fact("tensor")
    dtype: str = fact("dtype")
    shape: list[int] = fact("shape")
    bytes: int = fact("size", size, right=True)

    @classmethod
    def of(cls, spec: TensorSpec, name: str | None = None) -> Tensor:
        """Return a tensor, with the name in its file unless another one is given."""
        return cls(spec.name if name is None else name, spec.dtype, list(spec.shape), spec.nbytes)


@dataclass(frozen=True)
class File(Result):
    """A file of a commit."""

    name: str
    size: int
    digest: str
    tensors: list[Tensor] = rows()

    def title(self) -> str:
        """Return name and size."""
        return f"{self.name}, {size(self.size)}"


def _objects(values: Mapping[str, Any]) -> str:
    """Return a line for each value but tensors, which the tables of files show."""
    width = Console().width - 2 if sys.stdout.isatty() else None
    shown = {name: value for name, value in values.items() if not readable.only_tensors(value)}
    return "\n".join(readable.text(value, f"{name} = ", width) for name, value in shown.items())


def _random(value: Any) -> str:
    width = Console().width - 2 if sys.stdout.isatty() else None
    return "" if value is None else readable.text(value, "", width)


def _written(time: float) -> str:
    written = datetime.datetime.fromtimestamp(time).astimezone().isoformat(" ", "seconds")
    return f"{written} ({ago(time)})"


@dataclass(frozen=True)
class Content(Result):
    """The content of a commit."""

    root: str = fact("root")
    commit: str
    generation: int
    number: int
    time: float | None = fact("written", _written)
    writer: Mapping[str, Any] = fact("writer", _versions)
    state: str = fact("state", state)
    reason: str | None = fact("reason")
    world_size: int | None = fact("ranks")
    versions: Mapping[str, str] | None = fact("versions", _versions)
    bytes: int = fact("size", size)
    dataset: Any = fact("dataset", readable.text)
    files: list[File] = rows()
    attributes: Mapping[str, Any] = block("objects", _objects)
    samplers: Mapping[str, Any] = block("sample cursors", _objects)
    random: Any = block("random streams", _random)

    @classmethod
    def of(cls, url: str, found: Contents) -> Content:
        """Return the result of ``show``."""
        commit, manifest = Commit.of(found.entry), found.manifest
        layouts = found.layouts
        return cls(
            root=url,
            commit=commit.commit,
            generation=commit.generation,
            number=commit.number,
            time=commit.time,
            writer=manifest.writer,
            state=commit.state,
            reason=commit.reason,
            world_size=commit.world_size,
            versions=commit.versions,
            bytes=commit.bytes,
            dataset=manifest.dataset,
            files=[
                File(
                    each.name, each.size, each.digest, [Tensor.of(spec) for spec in layouts[each.name].specs]
                )
                for each in manifest.files
            ],
            attributes=found.attributes,
            samplers=found.samplers,
            random=manifest.state.get("random"),
        )

    def title(self) -> str:
        """Return the name of the commit."""
        return self.commit


@dataclass(frozen=True)
class Reshaped:
    """A tensor whose dtype or shape differs."""

    name: str = fact("tensor")
    a: str = fact("in A")
    b: str = fact("in B")


def _relative(value: float) -> str:
    return "from 0" if value == float("inf") else f"{value:.2g}"


@dataclass(frozen=True)
class Changed:
    """A tensor whose elements differ."""

    name: str = fact("tensor")
    dtype: str = fact("dtype")
    shape: list[int] = fact("shape")
    bytes: int
    relative_change: float = fact("change", _relative, right=True)
    elements_changed: int = fact("elements", right=True)
    non_finite: int = fact("not finite", lambda count: str(count or ""), right=True)
    largest_change: float
    largest_value: float


@dataclass(frozen=True)
class Object:
    """A plain object that differs."""

    path: str = fact("object")
    a: str | None = fact("in A", none="(none)")
    b: str | None = fact("in B", none="(none)")


@dataclass(frozen=True)
class Comparison(Result):
    """The differences between two commits."""

    root: str
    a: str
    b: str
    added: list[Tensor] = rows("added tensors")
    removed: list[Tensor] = rows("removed tensors")
    reshaped: list[Reshaped] = rows("tensors with another dtype or shape")
    changed: list[Changed] = rows("changed tensors: max|b - a| / max|a|")
    unchanged: list[str]
    objects: list[Object] = rows("changed objects")

    @classmethod
    def of(cls, url: str, a: str, b: str, found: Difference) -> Comparison:
        """Return the result of ``diff``."""
        return cls(
            root=url,
            a=a,
            b=b,
            added=[Tensor.of(spec, name) for name, spec in found.added.items()],
            removed=[Tensor.of(spec, name) for name, spec in found.removed.items()],
            reshaped=[Reshaped(name, str(a), str(b)) for name, (a, b) in found.reshaped.items()],
            changed=[
                Changed(
                    name=each.tensor,
                    dtype=each.spec.dtype,
                    shape=list(each.spec.shape),
                    bytes=each.spec.nbytes,
                    relative_change=each.relative,
                    elements_changed=each.changed,
                    non_finite=each.non_finite,
                    largest_change=each.largest,
                    largest_value=each.scale,
                )
                for each in found.changes
            ],
            unchanged=found.unchanged,
            objects=[Object(path, *texts) for path, texts in found.objects.items()],
        )

    def title(self) -> str:
        """Return the names of both commits."""
        return f"{self.a} → {self.b}"

    def notes(self) -> Iterable[Shown]:
        """Return the number of tensors that are equal."""
        yield f"{counted(len(self.unchanged), 'tensor')} unchanged"


# -- prune and export ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deletion:
    """A commit that is deleted."""

    commit: str
    bytes: int


@dataclass(frozen=True)
class Untouched:
    """A commit that prune leaves alone, whatever the rules are."""

    commit: str
    state: str
    reason: str | None


@dataclass(frozen=True)
class Pruned(Result):
    """The deletions of ``prune``, or those that it would make."""

    root: str
    dry_run: bool
    deleted: list[Deletion]
    leftovers: list[str]
    aside: list[Aside]
    kept: list[str]
    untouched: list[Untouched]
    bytes_freed: int

    @classmethod
    def of(cls, url: str, plan: Plan, deleted: Sequence[Entry] | None) -> Pruned:
        """Return the result of ``prune``; without ``deleted`` it is a plan."""
        gone = [*plan.delete, *plan.leftovers] if deleted is None else deleted
        return cls(
            root=url,
            dry_run=deleted is None,
            deleted=[Deletion(entry.id.name, entry.nbytes) for entry in gone],
            leftovers=[entry.id.name for entry in gone if entry in plan.leftovers],
            aside=Aside.of(plan.aside, left_over=True),
            kept=[entry.id.name for entry in plan.keep],
            untouched=[Untouched(entry.id.name, entry.state, entry.reason) for entry in plan.untouched],
            bytes_freed=sum(each.nbytes for each in (*gone, *plan.aside)),
        )

    def notes(self) -> Iterable[Shown]:
        """Return a line for each commit, and a summary."""
        verb = "would delete" if self.dry_run else "deleted"
        for each in self.deleted:
            incomplete = ", which was never completed" if each.commit in self.leftovers else ""
            yield f"{verb} {each.commit}, {size(each.bytes)}{incomplete}"
        for left in self.untouched:
            yield f"left {left.commit}, which is {left.state}{f': {left.reason}' if left.reason else ''}"
        if self.aside:
            yield f"{verb} files of ended processes: {_files(self.aside)}"
        yield f"kept: {', '.join(self.kept) or 'none'}"
        yield f"{verb} {counted(len(self.deleted), 'commit')}, {size(self.bytes_freed)}"


@dataclass(frozen=True)
class Near:
    """A near root on this host."""

    path: str
    root: str
    bytes: int
    used: float

    @classmethod
    def of(cls, root: NearRoot) -> Near:
        """Return a near root."""
        return cls(str(root.path), root.url, root.nbytes, root.used)

    def __str__(self) -> str:
        return (
            f"{self.path}: {size(self.bytes)} of {self.root or 'an unknown root'}, last used {ago(self.used)}"
        )


@dataclass(frozen=True)
class PrunedNear(Result):
    """The deletions of ``prune --near``, or those that it would make."""

    dry_run: bool
    deleted: list[Near]
    in_use: list[Near]
    bytes_freed: int

    @classmethod
    def of(cls, roots: Sequence[NearRoot], gone: Sequence[NearRoot], *, dry_run: bool) -> PrunedNear:
        """Return the result of ``prune --near``."""
        return cls(
            dry_run=dry_run,
            deleted=[Near.of(each) for each in gone],
            in_use=[Near.of(each) for each in roots if each not in gone],
            bytes_freed=sum(each.nbytes for each in gone),
        )

    def notes(self) -> Iterable[Shown]:
        """Return a line for each near root, and a summary."""
        verb = "would delete" if self.dry_run else "deleted"
        yield from (f"{verb} {each}" for each in self.deleted)
        yield from (f"left, since a process uses it: {each}" for each in self.in_use)
        yield f"{verb} {counted(len(self.deleted), 'near root')}, {size(self.bytes_freed)}"


@dataclass(frozen=True)
class Exported(Result):
    """A file that ``export`` wrote."""

    root: str
    commit: str
    attributes: list[str]
    file: Path
    bytes: int

    def notes(self) -> Iterable[Shown]:
        """Return a line."""
        yield f"{', '.join(self.attributes)} of {self.commit}: {self.file}, {size(self.bytes)}"


# -- discover ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """A host of a source."""

    host: str = fact("host")
    slots: int = fact("slots", right=True)
    state: str = fact("state", state)
    since: float = fact("since", ago, right=True)
    why: str = fact("why")


@dataclass(frozen=True)
class Hosts(Result):
    """The hosts of a source."""

    hosts: list[Host] = rows()

    @classmethod
    def of(cls, answer: Answer) -> Hosts:
        """Return the result of ``discover --explain``."""
        return cls([Host(each.name, each.slots, each.state, each.since, each.why) for each in answer.entries])

    def notes(self) -> Iterable[Shown]:
        """Say so if there are no hosts."""
        return () if self.hosts else ["the source names no host"]
