"""The commands' view of a checkpoint root, from outside the job. Only `prune` changes the root.

The fields of the dataclasses are the keys of ``--json``, which docs/commands.md describes.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from hvdrecover.checkpoint import CommitId, Keep, claims, redact, retention, root, values
from hvdrecover.checkpoint.arena import ITEM_BYTES, Arena, Bytes, TensorSpec, allocate, plan
from hvdrecover.checkpoint.manifest import FILE_NAME, FileEntry, HasState
from hvdrecover.checkpoint.retention import delete_commit, incomplete, is_of_before
from hvdrecover.checkpoint.root import read_commit, read_manifest
from hvdrecover.checkpoint.storage import Storage, failures
from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import (
    ConfigError,
    CorruptCheckpointError,
    ExportError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
    UnknownCommitError,
)
from hvdrecover.machine import Clock, has_ended
from hvdrecover.texts import printable

CHUNK = 1 << 20  # elements that are compared at a time
_TENSOR = "$tensor"
_WIDTH = 60  # characters of a value in a comparison
_DEPTH = 120  # containers; `values.encode` goes no deeper than 100

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
    """Return the commit with this name or number; None asks for the newest complete one."""
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
    errors: list[Exception] = []
    files: tuple[FileEntry, ...] = ()
    try:
        files = root.read_manifest(storage, found.id).files
    except (CorruptCheckpointError, FormatVersionError) as error:
        errors.append(error)
    for file in files:
        try:
            _verify_file(storage, found.id, file, advance)
        except CorruptCheckpointError as error:
            errors.append(error)
    problems = dict(root.reason(storage, found.id, error).split(": ", 1) for error in errors)
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
    facts = retention.survey(storage, keep.best, {}).values()
    unwanted = retention.expired(facts, keep, clock.now())
    problems = [each.problem for each in facts if each is not None]
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
    """Write the tensors of some attributes, or all, to a file, verified; return the attributes."""
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
        # The tensors of a single attribute keep their names: for a model, the keys of its ``state_dict``.
        prefix = f"{name}." if len(names) > 1 else ""
        specs = root.read_layout(storage, commit, manifest.by_attribute[name]).specs
        sources[name] = {spec.name: replace(spec, name=prefix + spec.name) for spec in specs}
    planned = plan([spec for named in sources.values() for spec in named.values()])
    with written_aside(path, force=force) as aside, aside.open("xb") as file:
        file.truncate(planned.nbytes)
        file.write(planned.header)
        for attribute, named in sources.items():
            # Memory holds one attribute at a time.
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


# -- diff ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    name: str  # a tensor with its attribute, `model.layer.weight`, or the path of an object
    change: str
    largest: float | None = None  # max|b - a| over the elements that differ and are finite in both


@dataclass(frozen=True)
class Comparison:
    """The differences between two commits of a root, and the number of tensors that are equal."""

    root: str
    a: str
    b: str
    differences: list[Difference]
    unchanged: int


def compare(storage: Storage, a: CommitId, b: CommitId, advance: Callable[[int], None]) -> Comparison:
    """Compare every byte of two commits; ``advance`` is called with the bytes compared, of both together."""
    manifests = [read_manifest(storage, commit) for commit in (a, b)]
    found: list[Difference] = []
    unchanged = 0
    for attribute in sorted({*manifests[0].by_attribute, *manifests[1].by_attribute}):
        # One file of each commit is in memory at a time.
        read = [read_commit(storage, commit, {attribute}).arenas.get(attribute) for commit in (a, b)]
        compared = _compare_tensors(attribute, *read)
        found += [each for each in compared if each]
        unchanged += compared.count(None)
        advance(sum(arena.layout.nbytes for arena in read if arena))
        del read  # free the memory before the next files are read
    objects = [
        {
            **each.attributes,
            **each.samplers,
            "(world size)": each.world_size,
            "(finished)": each.finished,
            "(random)": each.state.get("random"),
            "(versions)": dict(each.versions),
        }
        for each in manifests
    ]
    for path, texts in differences(*objects).items():
        found.append(Difference(path, " → ".join(texts)))
    return Comparison(storage.url, a.name, b.name, found, unchanged)


# -- tensors -------------------------------------------------------------------------------------------


def _compare_tensors(attribute: str, a: Arena | None, b: Arena | None) -> list[Difference | None]:
    """Return the difference of each tensor, None for those that are equal."""
    before, after = (arena.layout.by_name if arena else {} for arena in (a, b))
    found: list[Difference | None] = []
    for name in sorted({*before, *after}):
        shown, old, new = f"{attribute}.{name}", before.get(name), after.get(name)
        if old == new and old and a and b:
            changed, non_finite, largest = measure(old.dtype, a.bytes_of(name), b.bytes_of(name))
            note = f", {non_finite} not finite" if non_finite else ""
            elements = f"{changed} of {old.nbytes // ITEM_BYTES[old.dtype]} elements{note}"
            found.append(Difference(shown, elements, largest) if changed else None)
        elif old and new:
            found.append(Difference(shown, f"{old} → {new}"))
        else:
            found.append(Difference(shown, f"removed {old}" if old else f"added {new}"))
    return found


def measure(dtype: str, a: Bytes, b: Bytes) -> tuple[int, int, float]:
    """Return how many elements differ, how many of these are not finite, and the largest difference."""
    changed, non_finite, largest = 0, 0, 0.0
    # In chunks, as `different` makes wider copies.
    step = CHUNK * ITEM_BYTES[dtype]
    for start in range(0, len(a), step):
        x, y = different(dtype, a[start : start + step], b[start : start + step])
        finite = np.isfinite(x) & np.isfinite(y)
        changed += len(finite)
        non_finite += int(np.count_nonzero(~finite))
        with np.errstate(over="ignore", invalid="ignore"):
            largest = max(largest, float(np.max(np.abs(y - x), initial=0.0, where=finite)))
    return changed, non_finite, largest


def different(dtype: str, a: Bytes, b: Bytes) -> list[npt.NDArray[Any]]:
    """Return the elements of two tensors whose bits differ, as float64 or complex128."""
    rows = [each.reshape(-1, ITEM_BYTES[dtype]) for each in (a, b)]
    differ = (rows[0] != rows[1]).any(axis=1)
    wide = np.complex128 if dtype == "C64" else np.float64
    return [decode(each[differ].reshape(-1), dtype).astype(wide) for each in rows]


def decode(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the numbers that bytes stand for, as a flat array: of float32 for types that numpy lacks."""
    if dtype == "BF16":  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":  # a float16 with a bias of 7 instead of 15, and NaNs as its largest numbers
        bits = data.astype(np.uint16)
        numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(np.float16).astype(np.float32) * 256
        numbers[(data & 0x7F) == 0x7F] = np.nan
        return numbers
    kind = "u" if dtype == "BOOL" else dtype[0].lower()
    return data.view(f"<{kind}{ITEM_BYTES[dtype]}")


# -- plain objects -------------------------------------------------------------------------------------


def text(value: Json) -> str:
    """Return any JSON on one line, as Python would write the value that it encodes."""
    if only_tensors(value):
        count = sum(map(_is_tensor, _leaves(value).values()))
        return "<tensor>" if count == 1 else f"<{count} tensors>"
    # Another user may have written the commit: nothing is imported, and control characters are escaped.
    try:
        # It is malformed, or of a class that this program has not imported.
        made = values.decode(value)
    except ValueError:
        made = value
    return printable(re.sub(r"\n\s*", " ", repr(made)))


def _shortened(value: Json) -> str:
    line = text(value)
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def only_tensors(value: Json) -> bool:
    """Return whether a value is a tensor, or containers that hold only tensors."""
    leaves = [leaf for leaf in _leaves(value).values() if leaf not in ([], {})]
    return bool(leaves) and all(map(_is_tensor, leaves))


def holds_tensors(value: Json) -> bool:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict) and _TENSOR in item:
            return True
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return False


def differences(a: Json, b: Json) -> dict[str, tuple[str, str]]:
    """Return where two values differ, apart from tensors: path to both texts."""
    before, after = _leaves(a), _leaves(b)
    found = {}
    for path in {**before, **after}:
        sides = [side[path] for side in (before, after) if path in side]
        if all(map(_is_tensor, sides)) or (len(sides) == 2 and repr(sides[0]) == repr(sides[1])):
            continue
        texts = [_shortened(side[path]) if path in side else "(none)" for side in (before, after)]
        found["".join(path).lstrip(".")] = (texts[0], texts[1])
    return found


def _leaves(value: Json, path: tuple[str, ...] = (), depth: int = 0) -> dict[tuple[str, ...], Json]:
    """Return the values without items inside containers, by the steps of their paths."""
    items: Iterable[tuple[str, Json]] = ()
    pairs = value.get("$dict") if isinstance(value, dict) else None
    if isinstance(value, list):
        items = ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        items = ((f"[{_shortened(key)}]", item) for key, item in pairs)
    elif isinstance(value, dict) and not next(iter(value), "").startswith("$"):
        items = ((f".{printable(key)}", item) for key, item in value.items())
    found: dict[tuple[str, ...], Json] = {}
    for step, item in items if depth < _DEPTH else ():
        found |= _leaves(item, (*path, step), depth + 1)
    return found or {path: value}


def _is_tensor(value: Json) -> bool:
    return isinstance(value, dict) and list(value) == [_TENSOR]
