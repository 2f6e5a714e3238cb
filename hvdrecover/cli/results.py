"""The results of the commands that look at a checkpoint root; ``docs/commands.md`` describes their JSON."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from hvdrecover.checkpoint.inspection import readable
from hvdrecover.checkpoint.inspection.catalog import Contents, Entry
from hvdrecover.checkpoint.inspection.compare import Difference
from hvdrecover.checkpoint.inspection.prune import Plan
from hvdrecover.checkpoint.inspection.verify import Verdict
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.leftovers import Leftovers
from hvdrecover.checkpoint.near.place import NearRoot
from hvdrecover.checkpoint.storage import Temporary
from hvdrecover.cli.printer import Block, Fact, Result, Rows, Shown, age, size
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.reporting.text import counted

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

    commit: Annotated[str, Fact("commit")]
    generation: int
    number: int
    time: Annotated[float | None, Fact("age", _age, right=True)]
    bytes: Annotated[int, Fact("size", size, right=True)]
    world_size: Annotated[int | None, Fact("ranks", right=True)]
    versions: Annotated[Mapping[str, str] | None, Fact("framework", _framework)]
    state: Annotated[str, Fact("state", state)]
    reason: str | None
    intact: Annotated[bool | None, Fact("digests", _digests, none="unchecked")]
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
    commits: Annotated[list[Commit], Rows()]
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
        yield from _problems(self.commits)
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
class Verification(Result):
    """Whether commits are intact."""

    root: str
    intact: bool
    commits: Annotated[list[Commit], Rows()]

    def notes(self) -> Iterable[Shown]:
        """Return the problems, and a summary."""
        yield from _problems(self.commits)
        broken = sum(not each.intact for each in self.commits)
        yield f"{self.root}: {counted(len(self.commits), 'commit')} read, {broken or 'none'} broken"


def _problems(commits: Sequence[Commit]) -> Iterable[str]:
    for each in commits:
        if each.reason:
            yield f"{each.commit} is {each.state}: {each.reason}"
        for file, problem in (each.problems or {}).items():
            yield f"{each.commit} is broken: {file}: {problem}"


# -- show and diff -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor of a commit."""

    name: Annotated[str, Fact("tensor")]
    dtype: Annotated[str, Fact("dtype")]
    shape: Annotated[list[int], Fact("shape")]
    bytes: Annotated[int, Fact("size", size, right=True)]

    @classmethod
    def of(cls, spec: TensorSpec) -> Tensor:
        """Return a tensor with the name in its file."""
        return cls(spec.name, spec.dtype, list(spec.shape), spec.nbytes)


@dataclass(frozen=True)
class File(Result):
    """A file of a commit."""

    name: str
    size: int
    digest: str
    tensors: Annotated[list[Tensor], Rows()]

    def title(self) -> str:
        """Return name and size."""
        return f"{self.name}, {size(self.size)}"


def _objects(values: Mapping[str, Any]) -> str:
    """Return a line for each value but tensors, which the tables of files show."""
    shown = {name: value for name, value in values.items() if not readable.only_tensors(value)}
    return "\n".join(f"{name} = {readable.text(value)}" for name, value in shown.items())


def _random(value: Any) -> str:
    return "" if value is None else readable.text(value)


@dataclass(frozen=True)
class Content(Commit, Result):
    """The content of a commit."""

    root: Annotated[str, Fact("root")]
    written: Annotated[str, Fact("written")]
    writer: Annotated[Mapping[str, Any], Fact("writer", _versions)]
    dataset: Annotated[Any, Fact("dataset", readable.text)]
    files: Annotated[list[File], Rows()]
    attributes: Annotated[Mapping[str, Any], Block("objects", _objects)]
    samplers: Annotated[Mapping[str, Any], Block("sample cursors", _objects)]
    random: Annotated[Any, Block("random streams", _random)]

    @classmethod
    def of_root(cls, url: str, found: Contents) -> Content:
        """Return the result of ``show``."""
        manifest = found.manifest
        written = datetime.datetime.fromtimestamp(manifest.time).astimezone()
        return cls(
            **vars(Commit.of(found.entry)),
            root=url,
            written=written.isoformat(" ", "seconds"),
            writer=manifest.writer,
            dataset=manifest.dataset,
            files=[
                File(
                    each.name,
                    each.size,
                    each.digest,
                    [Tensor.of(spec) for spec in found.layouts[each.name].specs],
                )
                for each in manifest.files
            ],
            attributes=found.attributes,
            samplers=found.samplers,
            random=manifest.state.get("random"),
        )


@dataclass(frozen=True)
class Changed:
    """One difference between two commits; see `compare.Difference`."""

    name: Annotated[str, Fact("name")]
    change: Annotated[str, Fact("change")]
    largest: Annotated[float | None, Fact("largest difference", "{:.3g}".format, right=True)]


@dataclass(frozen=True)
class Comparison(Result):
    """The differences between two commits."""

    root: str
    a: str
    b: str
    differences: Annotated[list[Changed], Rows()]
    unchanged: int

    @classmethod
    def of(cls, url: str, a: str, b: str, found: Sequence[Difference], unchanged: int) -> Comparison:
        """Return the result of ``diff``."""
        return cls(url, a, b, [Changed(**vars(each)) for each in found], unchanged)

    def title(self) -> str:
        """Return the names of both commits."""
        return f"{self.a} → {self.b}"

    def notes(self) -> Iterable[Shown]:
        """Return the number of tensors that are equal."""
        yield f"{counted(self.unchanged, 'tensor')} unchanged"


# -- prune and export ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruned(Result):
    """The deletions of ``prune``, or those that it would make."""

    root: str
    dry_run: bool
    deleted: list[Commit]
    leftovers: list[str]
    aside: list[Aside]
    kept: list[str]
    untouched: list[Commit]
    bytes_freed: int

    @classmethod
    def of(cls, url: str, plan: Plan, deleted: Sequence[Entry] | None) -> Pruned:
        """Return the result of ``prune``; without ``deleted`` it is a plan."""
        gone = [*plan.delete, *plan.leftovers] if deleted is None else deleted
        return cls(
            root=url,
            dry_run=deleted is None,
            deleted=[Commit.of(entry) for entry in gone],
            leftovers=[entry.id.name for entry in gone if entry in plan.leftovers],
            aside=Aside.of(plan.aside, left_over=True),
            kept=[entry.id.name for entry in plan.keep],
            untouched=[Commit.of(entry) for entry in plan.untouched],
            bytes_freed=sum(each.nbytes for each in gone) + sum(file.nbytes for file in plan.aside),
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


def _near(root: NearRoot) -> str:
    url = root.url or "an unknown root"
    return f"{root.path}: {size(root.nbytes)} of {url}, last used {ago(root.used)}"


@dataclass(frozen=True)
class PrunedNear(Result):
    """The deletions of ``prune --near``, or those that it would make."""

    dry_run: bool
    deleted: list[NearRoot]
    in_use: list[NearRoot]
    bytes_freed: int

    @classmethod
    def of(cls, roots: Sequence[NearRoot], gone: Sequence[NearRoot], *, dry_run: bool) -> PrunedNear:
        """Return the result of ``prune --near``."""
        return cls(
            dry_run=dry_run,
            deleted=list(gone),
            in_use=[each for each in roots if each not in gone],
            bytes_freed=sum(each.nbytes for each in gone),
        )

    def notes(self) -> Iterable[Shown]:
        """Return a line for each near root, and a summary."""
        verb = "would delete" if self.dry_run else "deleted"
        yield from (f"{verb} {_near(each)}" for each in self.deleted)
        yield from (f"left, since a process uses it: {_near(each)}" for each in self.in_use)
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
