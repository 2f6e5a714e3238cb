"""The commands' view of a checkpoint root, from outside the job that writes it.

The functions list, show, verify, prune and export commits. Only `prune` changes the root. The results are
dataclasses; their fields are the keys of ``--json``, which docs/commands.md describes. A commit that is
listed as complete may still have a damaged data file, which only `verify` finds. For a folder that is not a
checkpoint root, the functions raise `UnknownCommitError`.
"""

from __future__ import annotations

import datetime
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import xxhash

from hvdrecover.checkpoint import claims, layout, root
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.comparison import only_tensors
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.manifest import FILE_NAME, FileEntry, HasState
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.retention import Pruner, delete_commit, incomplete, is_of_before
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.storage.interface import Storage, failures
from hvdrecover.checkpoint.values import Json
from hvdrecover.clock import Clock
from hvdrecover.errors import (
    ConfigError,
    CorruptCheckpointError,
    ExportError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
    UnknownCommitError,
)
from hvdrecover.machine import has_ended
from hvdrecover.redaction import redact

State = Literal["complete", "finished", "quarantined", "incomplete", "broken", "newer format"]
PIECE = 1 << 26  # bytes that are verified at a time, so verifying takes little memory

Advance = Callable[[int], None]  # called with the number of bytes that have just been read


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One commit of a root. What its manifest says is None if that cannot be read."""

    commit: str
    generation: int
    number: int
    time: float | None = None
    bytes: int
    world_size: int | None = None
    versions: Mapping[str, str] | None = None
    state: State  # incomplete: it is being written, or its writer was killed. broken: its manifest is
    reason: str | None = None  # why it is quarantined, broken or of a newer format
    intact: bool | None = None  # whether every byte is as it was written; None if it was not verified
    problems: Mapping[str, str] | None = None  # each broken file, and its problem

    @property
    def id(self) -> CommitId:
        return CommitId(self.generation, self.number)

    @property
    def is_whole(self) -> bool:
        """Return whether a job can resume from it, as far as its manifest shows."""
        return self.state in ("complete", "finished")


# -- listing and finding -------------------------------------------------------------------------------


def commits(storage: Storage) -> list[CommitId]:
    """Return the commits of a root, newest first; none if a job has just begun."""
    if found := root.commits(storage):
        return found
    names = storage.names()
    if root.CLAIMS in names:
        return []
    if not names:
        problem = "there is no checkpoint root here: the folder does not exist, or is empty. Check the URL"
    elif FILE_NAME in names:
        problem = "this is one commit of a checkpoint root; name the folder above it, and the commit after it"
    else:
        problem = f"this is not a checkpoint root: it holds no commits, but '{names[0]}'. Check the URL"
    raise UnknownCommitError(storage.url, problem, [])


def entries(storage: Storage) -> list[Entry]:
    """Return the commits of a root, newest first; skip those that are deleted meanwhile."""
    return [each for commit in commits(storage) if (each := entry(storage, commit)) is not None]


def find(storage: Storage, wanted: str | None) -> CommitId:
    """Return the commit with a name or a number; the newest complete one for None.

    Raises:
        UnknownCommitError: no commit matches, or several have this number.
    """
    found = commits(storage)
    if wanted is None:
        for commit in found:
            if root.is_complete(storage, commit):
                return commit
        raise UnknownCommitError(storage.url, "it holds no complete commit yet", [])
    matches = [commit for commit in found if wanted in (commit.name, str(commit.commit))]
    if len(matches) == 1:
        return matches[0]
    names = [commit.name for commit in matches or found]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if matches:
        problem = f"several commits have the number {wanted}: {shown}. Give the whole name"
    else:
        problem = f"it holds no commit '{redact(wanted)}'; it holds {shown or 'none at all yet'}"
    raise UnknownCommitError(storage.url, problem, names)


def entry(storage: Storage, commit: CommitId) -> Entry | None:
    """Return the facts of one commit; None if it has no folder."""
    manifest, reason = None, None
    state: State
    try:
        names = storage.names(commit.name)
        nbytes = sum(storage.size(f"{commit.name}/{name}") or 0 for name in names)
        try:
            manifest = root.read_manifest(storage, commit)
            state = "finished" if manifest.finished else "complete"
            if root.QUARANTINE in names:
                state, reason = "quarantined", _note(storage, root.quarantine_path(commit))
        except IncompleteCommitError:
            state = "incomplete"
        except (CorruptCheckpointError, FormatVersionError) as error:
            state = "newer format" if isinstance(error, FormatVersionError) else "broken"
            reason = root.reason(storage, commit, error)
    except StorageError:
        if not root.is_complete(storage, commit):
            return None  # deleted meanwhile
        raise
    if not names:
        return None
    facts: dict[str, Any] = {"commit": commit.name, "generation": commit.generation, "number": commit.commit}
    facts |= {name: getattr(manifest, name, None) for name in ("time", "world_size", "versions")}
    return Entry(**facts, bytes=nbytes, state=state, reason=reason)


def _note(storage: Storage, path: str) -> str:
    try:
        return str(json.loads(root.read_note(storage, path))["reason"])
    except (ValueError, KeyError, TypeError, RecursionError, StorageError):
        return "the note with the reason cannot be read"


# -- ls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aside:
    """A file that is still being written, or was left over: no process can complete it any more."""

    path: str
    bytes: int
    left_over: bool


@dataclass(frozen=True)
class Listing:
    """The content of a root; ``leftovers`` names the commits that will never be completed."""

    root: str
    commits: list[Entry]
    leftovers: list[str]
    aside: list[Aside]


def look(storage: Storage) -> Listing:
    """List the content of a root; only manifests are read."""
    found, before = entries(storage), _being_written(storage)
    begun, _ = incomplete(storage, before)
    try:
        temporaries = storage.temporaries()
    except StorageError:  # some stores let users read files, but not list uploads
        temporaries = []
    left = [each.commit for each in found if each.state == "incomplete" and each.id in begun]
    aside = [
        Aside(each.path, each.nbytes, before > 0 and is_of_before(each.folder, before))
        for each in temporaries
    ]
    return Listing(storage.url, found, left, aside)


def _being_written(storage: Storage) -> int:
    """Return the generation that may be being written; 0 without any claim. No earlier one is written."""
    owner = claims.owner(claims.deciding(storage, claims.among(storage.names(root.CLAIMS))))
    if owner is None:
        return 0
    # The successor of a process that has ended claims a later generation first.
    return owner.generation + 1 if has_ended(owner.process) else owner.generation


# -- show ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contents(Entry):
    """One commit with its contents, but the bytes of its tensors."""

    root: str
    written: str
    writer: Mapping[str, Any]
    dataset: Mapping[str, Any] | None
    files: list[dict[str, Any]]  # name, size, digest; tensors: a list of name, dtype, shape, bytes
    attributes: Mapping[str, Json]
    samplers: Mapping[str, Json]
    random: Json


def look_into(storage: Storage, commit: CommitId) -> Contents:
    """Read a commit's manifest and the headers of its files, and check no digest of a file."""
    manifest, facts = root.read_manifest(storage, commit), entry(storage, commit)
    if facts is None:
        raise CorruptCheckpointError(f"{storage.url}/{commit.name}", "it has just been deleted")
    files = []
    for file in manifest.files:
        specs = root.read_layout(storage, commit, file).specs
        tensors = [{"name": s.name, "dtype": s.dtype, "shape": s.shape, "bytes": s.nbytes} for s in specs]
        files.append({**vars(file), "tensors": tensors})
    return Contents(
        **vars(facts),
        root=storage.url,
        written=datetime.datetime.fromtimestamp(manifest.time).astimezone().isoformat(" ", "seconds"),
        writer=manifest.writer,
        dataset=manifest.dataset,
        files=files,
        attributes=manifest.attributes,
        samplers=manifest.samplers,
        random=manifest.state.get("random"),
    )


# -- verify --------------------------------------------------------------------------------------------


def verify(storage: Storage, found: Entry, advance: Advance) -> Entry:
    """Read every byte of a commit, and compare it with the digests of the manifest."""
    problems: dict[str, str] = {}

    def note(error: Exception) -> None:
        file, _, problem = root.reason(storage, found.id, error).partition(": ")
        problems[file] = problem

    files: tuple[FileEntry, ...] = ()
    try:
        files = root.read_manifest(storage, found.id).files
    except (CorruptCheckpointError, FormatVersionError) as error:
        note(error)
    for file in files:
        try:
            _verify_file(storage, found.id, file, advance)
        except CorruptCheckpointError as error:
            note(error)
    return replace(found, intact=not problems, problems=problems)


def _verify_file(storage: Storage, commit: CommitId, file: FileEntry, advance: Advance) -> None:
    path = f"{commit.name}/{file.name}"
    root.read_layout(storage, commit, file)  # checks size and header
    buffer, found, position = allocate(min(PIECE, file.size)), xxhash.xxh3_128(), 0
    while position < file.size:
        piece = buffer[: file.size - position]
        count = storage.read_into(path, piece, position).size
        if count < len(piece):
            break
        found.update(piece.data)
        position += count
        advance(count)
    if found.hexdigest() != file.digest:
        what = "the file's content does not match the manifest's digest"
        raise CorruptCheckpointError(f"{storage.url}/{path}", what)


def verify_all(storage: Storage, wanted: Sequence[Entry], advance: Advance) -> list[Entry]:
    """Verify commits in the given order; skip those that a running job deletes meanwhile."""
    verified = [verify(storage, each, advance) for each in wanted]
    return [each for each in verified if each.intact or storage.names(each.commit)]


# -- prune ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pruning:
    """The deletions that pruning makes, or would make."""

    root: str
    dry_run: bool
    deleted: list[Entry]  # commits that the rules do not keep, oldest first; then the leftovers
    leftovers: list[str]
    aside: list[Aside]
    kept: list[str]  # good commits, newest first
    untouched: list[Entry]  # commits that may be being written, or are broken or of a newer format
    bytes_freed: int


def plan_pruning(storage: Storage, keep: Keep, clock: Clock) -> Pruning:
    """Decide what to delete, by the rules of a job's retention; changes nothing."""
    pruner = Pruner(storage, keep, clock)
    unwanted = pruner.expired()
    problems = [facts.problem for facts in pruner.good.values()]
    if problems and all(problems):
        raise ConfigError("--keep-best", f"{problems[0]}, in any of the {len(problems)} commits")
    listing = look(storage)
    good = [each for each in listing.commits if each.is_whole]
    begun = [each for each in listing.commits if each.commit in listing.leftovers]
    expired = [each for each in reversed(good) if each.id in unwanted]
    aside = [each for each in listing.aside if each.left_over]
    return Pruning(
        root=storage.url,
        dry_run=True,
        deleted=expired + begun,
        leftovers=listing.leftovers,
        aside=aside,
        kept=[each.commit for each in good if each.id not in unwanted],
        untouched=[each for each in listing.commits if each not in good and each not in begun],
        bytes_freed=sum(each.bytes for each in expired + begun) + sum(each.bytes for each in aside),
    )


def check_one_is_intact(storage: Storage, plan: Pruning, advance: Advance) -> None:
    """Verify the commits that are kept from the newest on, until one is intact, or raise an error."""
    broken = []
    if len(plan.deleted) == len(plan.leftovers):
        return
    for each in entries(storage):
        if each.commit not in plan.kept:
            continue
        verified = verify(storage, each, advance)
        if verified.intact:
            return
        broken += [f"{each.commit}: {file}: {what}" for file, what in (verified.problems or {}).items()]
    problem = "nothing was deleted, for not one of the commits that would be kept is intact: "
    raise CorruptCheckpointError(storage.url, problem + "; ".join(broken))


def prune(storage: Storage, plan: Pruning) -> Pruning:
    """Delete the commits and files of a plan. Deletions before an error stand."""
    for each in plan.deleted:
        delete_commit(storage, each.id)
    if plan.aside:
        before = _being_written(storage)
        storage.tidy(lambda folder: is_of_before(folder, before))
    return replace(plan, dry_run=False)


# -- export --------------------------------------------------------------------------------------------


def to_safetensors(
    storage: Storage, commit: CommitId, only: Sequence[str], path: Path, *, force: bool
) -> list[str]:
    """Write the tensors of some attributes, or all, to a file, verified; returns the attributes.

    If one attribute is exported, its tensors keep their names, for a model the keys of its ``state_dict``. If
    several are exported, the attribute's name becomes a prefix, as in ``model.layer.weight``. Memory holds
    one attribute at a time.
    """
    manifest, url = root.read_manifest(storage, commit), f"{storage.url}/{commit.name}"
    names = chosen(manifest, only, url)
    pure = [name for name, value in manifest.attributes.items() if only_tensors(value)]
    if others := [name for name in names if name not in pure]:
        remedy = f"name one that does with --only ({', '.join(pure)})" if pure else "none of this commit does"
        raise ExportError(
            url,
            f"a safetensors file can hold tensors and nothing else, and so can't hold {', '.join(others)}; "
            f"export to a .pt file, or {remedy}",
        )
    sources: dict[str, dict[str, TensorSpec]] = {}  # by attribute and name: the tensor in the new file
    for name in names:
        prefix = f"{name}." if len(names) > 1 else ""
        specs = root.read_layout(storage, commit, manifest.by_attribute[name]).specs
        sources[name] = {spec.name: replace(spec, name=prefix + spec.name) for spec in specs}
    planned = layout.plan([spec for named in sources.values() for spec in named.values()])
    with written_aside(path, force=force) as aside, aside.open("xb") as file:
        file.truncate(planned.nbytes)
        file.write(planned.header)
        for attribute, named in sources.items():
            arena = read_commit(storage, commit, {attribute}).arenas[attribute]
            for name, spec in named.items():
                file.seek(planned.offsets[spec.name])
                file.write(arena.bytes_of(name).data)
    return names


def chosen(commit: HasState, only: Sequence[str], url: str) -> list[str]:
    """Return the attributes that a user names, in the order of the commit; all, if none is named."""
    there = [*commit.attributes, *commit.samplers]
    for name in only:
        if name not in there:
            raise ExportError(url, f"the commit has no attribute '{name}'; it has {', '.join(there)}")
    return [name for name in there if not only or name in only]


@contextmanager
def written_aside(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path beside a file; at the end, fsync it and rename it to the file."""
    if path.exists() and not force:
        raise ExportError(str(path), "the file exists; name another one, or pass --force to replace it")
    aside = path.with_name(f".hvdrecover-{uuid.uuid4().hex}{path.suffix}")
    with failures(str(path), "", "write the file"):
        try:
            yield aside
            with aside.open("rb") as file:
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
