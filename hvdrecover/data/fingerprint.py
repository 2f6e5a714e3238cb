"""The fingerprint of training data: what is kept of them in a commit, to see later whether they have changed.

It finds what happens by mistake: another version of a data set, files that are missing, added, cut short,
converted or overwritten. It is not a defence against somebody who means to deceive.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.data.fingerprints import arrays, datasets, file_differences, files, series
from hvdrecover.data.fingerprints.files import Files
from hvdrecover.data.fingerprints.series import Series
from hvdrecover.data.order import is_sampler
from hvdrecover.errors import ConfigError

VERSION = 1  # of how data are looked at; digests of different versions can't be compared

_WANTED = (
    "pass paths or URLs of files and folders, arrays or tensors, a data set with a length and elements by "
    "number, or a tf.data data set"
)
_NAMES = {"files": "files", "arrays": "arrays", "dataset": "a data set", "stream": "a stream of elements"}


@dataclass(frozen=True)
class Fingerprint:
    """The facts known about training data; see `fingerprint`.

    Attributes:
        kind: ``files``, ``arrays``, ``dataset`` (elements by number) or ``stream`` (elements in their order).
        full: whether every byte was looked at.
        content: what is known of the files; or of each array, by its path in what was passed; or, under an
            empty name, of the data set.
    """

    kind: str
    full: bool
    content: Files | Mapping[str, Series]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON for a manifest: at most 64 KB, however large the data are."""
        if isinstance(self.content, Files):
            content = self.content.as_json()
        else:
            content = {name: each.as_json() for name, each in self.content.items()}
        return {"version": VERSION, "kind": self.kind, "full": self.full, "content": content}

    @staticmethod
    def from_json(fields: Any) -> Fingerprint:
        """Read what `as_json` gave, of this version or an earlier one; unknown fields are passed over.

        Raises:
            ConfigError: it is nonsense, or of a newer version.
        """
        try:
            if int(fields["version"]) > VERSION:
                raise ConfigError(
                    "fingerprint",
                    f"it is of version {fields['version']}, and this hvdrecover knows {VERSION}; upgrade",
                )
            kind, full, content = str(fields["kind"]), bool(fields["full"]), fields["content"]
            if kind not in _NAMES:
                raise ValueError(f"there is no kind {kind!r}")
            if kind == "files":
                return Fingerprint(kind, full, Files.from_json(content))
            return Fingerprint(kind, full, {name: Series.from_json(each) for name, each in content.items()})
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError("fingerprint", f"what was stored can't be one ({error!r})") from error


def fingerprint(data: Any, *, full: bool = False) -> Fingerprint:
    """Take the fingerprint of training data.

    Equal data have equal fingerprints on every host and in every process: a folder may be moved, arrays may
    be of another framework. By default few of the bytes are read:

    - of files, names and sizes, and the tags of stores that have them (an S3 ETag, which also changes when
      the same bytes are uploaded in other parts); else blocks of up to 128 files, or of 16 on a server;
    - of arrays, dtype and shape, and up to 256 elements, of large ones parts;
    - of a data set, its length and 64 elements;
    - of a stream, the first 64, so that later ones can change unseen.

    The first file or element is always among them, and the last one, except of a stream. With more files than
    a manifest should hold, ranges of names are kept instead of the names.

    Args:
        data: one of

            - a path or fsspec URL of a file or folder, or a list of them; wildcards are ``*``, ``[…]``,
              ``**`` and, where it begins no query, ``?``. Links are followed; hidden files count;
            - an array or tensor, of numpy, torch or TensorFlow or one like them, or a list, tuple or dict of
              them;
            - a data set with ``len`` and elements by number. Random augmentation must come from the global
              generators of Python, numpy or torch, which are seeded meanwhile;
            - a ``tf.data`` data set, or another iterable that gives the same elements each time.
        full: look at every byte. A change is then found wherever it is.

    Raises:
        ConfigError: something else was passed, there is nothing at a path, or elements differ from one
            reading to the next.
        StorageError: the files can't be listed or read.

    Examples:
        >>> before = recover.fingerprint({"x": np.zeros((100, 8)), "y": np.arange(100)})
        >>> before == recover.fingerprint({"x": np.ones((100, 8)), "y": np.arange(100)})
        False
    """
    urls = _urls(data)
    if urls is not None:
        return Fingerprint("files", full, files.take(urls, full, SYSTEM_CLOCK))
    _refuse(data)
    found = arrays.leaves(data)
    if found is not None and len(found) <= arrays.MOST:
        return Fingerprint("arrays", full, arrays.take(found, full))
    if isinstance(data, Mapping) and found is not None:
        data = datasets.Items(data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping):
        return Fingerprint("dataset", full, {"": datasets.take_numbered(data, full)})
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        return Fingerprint("stream", full, {"": datasets.take_stream(data, full)})
    raise ConfigError("data", f"a {type(data).__name__} has no fingerprint; {_WANTED}")


def _urls(data: Any) -> list[str] | None:
    """Paths and URLs as texts, if that is what was passed."""
    if isinstance(data, str | os.PathLike):
        return [os.fsdecode(data)]
    if isinstance(data, list | tuple) and data and all(isinstance(each, str | os.PathLike) for each in data):
        return [os.fsdecode(each) for each in data]
    return None


def _refuse(data: Any) -> None:
    """Refuse what looks like data, but is something else."""
    if is_sampler(data):
        raise ConfigError(
            "data", "its elements depend on the rank and on the cursor; pass the data that are dealt out"
        )
    if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
        raise ConfigError("data", f"a {type(data).__name__} gives batches, in any order; pass its .dataset")
    if isinstance(data, bytes | bytearray | set | frozenset) or (
        isinstance(data, list | tuple | dict) and not data
    ):
        shown = f"{data!r}" if not data else f"a {type(data).__name__}"
        raise ConfigError("data", f"{shown} has no fingerprint; {_WANTED}")
    if hasattr(data, "__next__"):
        raise ConfigError("data", f"a {type(data).__name__} can be read only once; {_WANTED}")


def differences(stored: Fingerprint, present: Fingerprint) -> list[str]:
    """Return a line for each known change from one fingerprint to another.

    If only one of them is full, what both have looked at is compared.
    """
    if stored.kind != present.kind:
        return [f"the data were {_NAMES[stored.kind]}, and are {_NAMES[present.kind]}"]
    if isinstance(stored.content, Files) and isinstance(present.content, Files):
        return file_differences.differences(stored.content, present.content)
    assert not isinstance(stored.content, Files) and not isinstance(present.content, Files)
    old, new = stored.content, present.content
    lines = [f"removed: data{name}" for name in old if name not in new]
    lines += [f"added: data{name}" for name in new if name not in old]
    for name in old:
        if name in new:
            prefix = f"data{name}: " if name else ""
            lines += [prefix + line for line in series.differences(old[name], new[name])]
    return lines
