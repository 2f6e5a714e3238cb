"""The manifest, and a snapshot, which is the same commit in memory.

The manifest is written last, so a commit exists if and only if its manifest validates.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Arena, Layout, digest
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError, UnsupportedValueError
from hvdrecover.texts import printable

FORMAT = 1  # the format that this version writes
FILE_NAME = "MANIFEST.json"
MAX_BYTES = 1 << 28  # maximum size of a manifest; a larger file is not read into memory
TENSORS = ".safetensors"
_DATA_FILE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class FileEntry:
    name: str
    size: int
    digest: str


class HasState:
    """A commit, with or without its tensors: a `Manifest` or a `Snapshot`."""

    state: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        """The structure of each attribute but the samplers: containers, plain values, names of tensors."""
        return self.state.get("attributes", {})  # type: ignore[no-any-return]

    @property
    def samplers(self) -> dict[str, Any]:
        """The cursor of each sampler, by attribute name."""
        return self.state.get("samplers", {})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Manifest(HasState):
    """Everything about a commit but its tensors."""

    generation: int
    commit: int
    time: float  # seconds since the Unix epoch
    writer: dict[str, Any]  # host, pid and rank of the process
    world_size: int
    versions: dict[str, str]
    files: tuple[FileEntry, ...]
    state: dict[str, Any]  # as in `Snapshot`
    dataset: dict[str, Any] | None = None
    finished: bool = False

    @property
    def id(self) -> CommitId:
        return CommitId(self.generation, self.commit)

    @property
    def by_attribute(self) -> dict[str, FileEntry]:
        """The data files by the attributes whose tensors they hold."""
        return {file.name.removesuffix(TENSORS): file for file in self.files}


@dataclass(frozen=True)
class Snapshot(HasState):
    """Everything that a job needs to resume from one commit; it does not change."""

    id: CommitId
    arenas: dict[str, Arena]  # by the attribute that holds the tensors
    state: dict[str, Any]  # all else as JSON, and mappings that are read when it is written
    world_size: int
    versions: dict[str, str]
    finished: bool = False
    dataset: dict[str, Any] | None = None  # version of the training data
    digests: dict[str, str] | None = None  # of the files, by attribute; None if not computed
    job: str = ""  # JOB/START of the job that made it; of near commits only

    @classmethod
    def of(cls, manifest: Manifest, arenas: dict[str, Arena]) -> Snapshot:
        files, job = manifest.by_attribute, str(manifest.writer.get("job", ""))
        digests = {name: files[name].digest for name in arenas}
        return cls(manifest.id, arenas, digests=digests, job=job, **_shared(manifest))

    def digested(self) -> Snapshot:
        """Return the commit with the digests of its files; a gigabyte takes 50 ms, if they are not known."""
        if self.digests is not None:
            return self
        return replace(self, digests={name: digest(arena.buffer) for name, arena in self.arenas.items()})

    def manifest(self, digests: Mapping[str, str], writer: dict[str, Any], time: float) -> Manifest:
        sizes = {name: arena.layout.nbytes for name, arena in self.arenas.items()}
        files = tuple(FileEntry(f"{name}{TENSORS}", sizes[name], digests[name]) for name in sizes)
        return Manifest(**vars(self.id), time=time, writer=writer, files=files, **_shared(self))

    @property
    def layouts(self) -> dict[str, Layout]:
        return {name: arena.layout for name, arena in self.arenas.items()}

    @property
    def nbytes(self) -> int:
        return sum(arena.layout.nbytes for arena in self.arenas.values())


def _shared(commit: HasState) -> dict[str, Any]:
    names = ("world_size", "versions", "state", "dataset", "finished")
    return {name: getattr(commit, name) for name in names}


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), default=dict).encode()


def dumps(manifest: Manifest) -> bytes:
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    fields["files"] = [dataclasses.asdict(file) for file in manifest.files]
    text = _canonical({"format": FORMAT, **fields})
    if len(text) > MAX_BYTES - 100:
        raise UnsupportedValueError(
            "state",
            f"its plain objects take {len(text)} bytes as JSON, and a commit can hold {MAX_BYTES}; keep what "
            "is large as tensors",
        )
    # The digest is the xxh3-128 of the object without it. Keys keep their order, which matters in a user's
    # dict. The text is encoded once, by the encoder that is written in C: this runs beside the training loop.
    return text[:-1] + b',"digest":"' + digest(text).encode() + b'"}'


def loads(data: bytes, url: str, expected: CommitId | None = None) -> Manifest:
    """Read a manifest and check it; ``expected`` is the commit whose folder holds it."""
    try:
        fields = json.loads(data.decode())  # from bytes, json would guess at other encodings
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        claimed, version = fields.pop("digest", None), fields.get("format")
        if type(version) is not int:
            raise ValueError(f"format {version!r} is not a number")
        # Another format may make its digest in another way. Format 1 with just the number altered is damage.
        if version not in READERS and claimed != digest(_canonical({**fields, "format": 1})):
            raise unknown_format(url, version, fields.get("versions"))
        if claimed != digest(_canonical(fields)):
            raise CorruptCheckpointError(url, "the manifest's digest does not match its content")
        manifest = READERS[version](fields)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(url, f"the manifest is not valid JSON of format 1 ({error})") from error
    if expected not in (None, manifest.id):
        raise CorruptCheckpointError(url, f"the manifest is that of {manifest.id}")
    return manifest


def unknown_format(url: str, version: int, versions: Any = None) -> FormatVersionError:
    """Return the error for a format that `READERS` lacks; ``versions`` are of the writer's packages."""
    writer = versions.get("hvdrecover") if isinstance(versions, dict) else None
    wanted = f"hvdrecover>={writer}" if isinstance(writer, str) else "hvdrecover"
    known = ", ".join(map(str, READERS))
    return FormatVersionError(
        url,
        f"it is of format {version}, and this hvdrecover reads format {known}. It was left as it is. Install "
        f"a version that reads it: pip install --upgrade '{printable(wanted)}'",
    )


def _read_1(fields: dict[str, Any]) -> Manifest:
    # Unknown fields are ignored, and a field with a default may be missing: so a field can be added without a
    # new format.
    values = {}
    for field in dataclasses.fields(Manifest):
        if field.name in fields or field.default is dataclasses.MISSING:
            values[field.name] = fields[field.name]
            if type(values[field.name]) not in _TYPES[field.name]:
                raise TypeError(f"{field.name} is of the wrong type")
    if not all(isinstance(values["state"].get(name, {}), dict) for name in ("attributes", "samplers")):
        raise TypeError("the attributes or samplers are not a JSON object")
    if not math.isfinite(values["time"]):
        raise ValueError("the time is not finite")
    files = values["files"] = tuple(
        FileEntry(entry["name"], entry["size"], entry["digest"]) for entry in values["files"]
    )
    for file in files:
        if not _DATA_FILE.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is not the name of a data file")
        if type(file.size) is not int or file.size < 0 or not _DIGEST.fullmatch(file.digest):
            raise ValueError(f"size or digest of {file.name} is invalid")
    if len({file.name for file in files}) != len(files):
        raise ValueError("a data file is listed twice")
    return Manifest(**values)


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("generation", "commit", "world_size"), (int,)),
    **dict.fromkeys(("writer", "versions", "state"), (dict,)),
    **{"time": (float, int), "files": (list,), "dataset": (dict, type(None)), "finished": (bool,)},
}
READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read_1}
"""Format version to the function that makes a manifest of the JSON object."""
