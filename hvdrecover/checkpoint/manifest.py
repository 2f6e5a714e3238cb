"""The manifest: what makes a folder of files a commit.

A JSON object with the fields of `Manifest`, and ``digest``: the xxh3-128 of the same object without it and
without spaces. Keys keep their order, which matters in a user's dict. The manifest is written last, so a
commit exists if and only if its manifest validates.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import digest
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError, UnsupportedValueError

FORMAT = 1
FILE_NAME = "MANIFEST.json"
MAX_BYTES = 1 << 28  # of a manifest; what claims to be larger is not read into memory
TENSORS = ".safetensors"
_DATA_FILE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_KINDS: dict[str, tuple[type, ...]] = {
    "generation": (int,),
    "commit": (int,),
    "time": (float, int),
    "writer": (dict,),
    "world_size": (int,),
    "versions": (dict,),
    "files": (list,),
    "state": (dict,),
    "dataset": (dict, type(None)),
    "finished": (bool,),
}


@dataclass(frozen=True)
class FileEntry:
    """One data file: its name, size in bytes and xxh3-128 in hexadecimal."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a commit but its tensors.

    Attributes:
        generation: see `CommitId`.
        commit: see `CommitId`.
        time: when it was written, in seconds since the Unix epoch.
        writer: host, pid and rank of the process that wrote it.
        world_size: number of ranks when the commit was made.
        versions: of the framework, Horovod and hvdrecover.
        files: the data files.
        state: what a `hvdrecover.checkpoint.snapshot.Snapshot` has beside tensors: components' structure,
            plain objects, sample cursors, seed and generator states.
        dataset: version of the training data, or None.
        finished: whether the training function had returned.
    """

    generation: int
    commit: int
    time: float
    writer: dict[str, Any]
    world_size: int
    versions: dict[str, str]
    files: tuple[FileEntry, ...]
    state: dict[str, Any]
    dataset: dict[str, Any] | None = None
    finished: bool = False

    @property
    def id(self) -> CommitId:
        """The commit's identity."""
        return CommitId(self.generation, self.commit)

    @property
    def by_attribute(self) -> dict[str, FileEntry]:
        """The data files by the attributes whose tensors they hold."""
        return {file.name.removesuffix(TENSORS): file for file in self.files}


def dumps(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file.

    Raises:
        UnsupportedValueError: the state's plain objects take more than `MAX_BYTES`.
    """
    fields = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    fields["files"] = [dataclasses.asdict(file) for file in manifest.files]
    text = _canonical({"format": FORMAT, **fields})
    if len(text) > MAX_BYTES - 100:
        raise UnsupportedValueError(
            "state",
            f"its plain objects take {len(text)} bytes as JSON, and a commit can hold {MAX_BYTES}; keep what "
            "is large as tensors",
        )
    # Encoded once, by the encoder that is written in C: this runs beside the training loop.
    return text[:-1] + b',"digest":"' + digest(text).encode() + b'"}'


def loads(data: bytes, url: str, expected: CommitId | None = None) -> Manifest:
    """Read a manifest and check it.

    Args:
        data: the file's bytes.
        url: what to call it in an error.
        expected: the commit whose folder it lies in, if it must be that one's.

    Raises:
        CorruptCheckpointError: it is truncated, altered or nonsense.
        FormatVersionError: it is of a newer format.
    """
    try:
        fields = json.loads(data.decode())  # or it would guess at other encodings
        if not isinstance(fields, dict):
            raise CorruptCheckpointError(url, "the manifest is not a JSON object")
        claimed, version = fields.pop("digest", None), fields.get("format")
        found = digest(_canonical(fields))
        # A newer format may make its digest in another way. Ours with just the number altered is damage.
        ours = digest(_canonical({**fields, "format": FORMAT}))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(url, f"the manifest is not JSON ({error})") from error
    if type(version) is int and version > FORMAT and claimed != ours:
        raise FormatVersionError(
            url, f"it is of format {version}, and this hvdrecover reads up to {FORMAT}; upgrade hvdrecover"
        )
    if claimed != found:
        raise CorruptCheckpointError(url, "the manifest's digest does not match its content")
    try:
        manifest = _build(fields)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptCheckpointError(url, f"the manifest is malformed ({error!r})") from error
    if expected not in (None, manifest.id):
        raise CorruptCheckpointError(url, f"the manifest is that of {manifest.id}")
    return manifest


def _canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), default=dict).encode()


def _build(fields: dict[str, Any]) -> Manifest:
    if type(fields["format"]) is not int or fields["format"] != FORMAT:
        raise ValueError(f"there is no format {fields['format']!r}")
    for name, kind in _KINDS.items():
        if type(fields[name]) not in kind:
            raise TypeError(f"{name} is not of the right type")
    if not math.isfinite(fields["time"]):
        raise ValueError("the time can't be")
    files = tuple(FileEntry(**entry) for entry in fields["files"])
    for file in files:
        if not _DATA_FILE.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is not the name of a data file")
        if type(file.size) is not int or file.size < 0 or not _DIGEST.fullmatch(file.digest):
            raise ValueError(f"the size or digest of {file.name} can't be")
    if len({file.name for file in files}) != len(files):
        raise ValueError("a data file is listed twice")
    names = {field.name for field in dataclasses.fields(Manifest)}
    return Manifest(**{**{name: fields[name] for name in names}, "files": files})
