"""The differences between two fingerprints of files."""

from __future__ import annotations

from collections.abc import Sequence

from hvdrecover.data.fingerprints import ranges
from hvdrecover.data.fingerprints.files import Files
from hvdrecover.data.fingerprints.ranges import Range

_MOST = 10  # lines of one kind


def differences(stored: Files, present: Files) -> list[str]:
    """Return what differs, a line each; what only one of them knows is not compared."""
    same_tags = stored.tag is not None and stored.tag == present.tag
    if stored.exact and present.exact:
        return _of_files(stored, present, same_tags)
    return _of_ranges(stored, present, same_tags)


def _of_files(stored: Files, present: Files, same_tags: bool) -> list[str]:
    old, new = ({each.first: each for each in files.ranges} for files in (stored, present))
    both = [name for name in old if name in new]
    resized = {name for name in both if old[name].nbytes != new[name].nbytes}
    altered = {name for name in both if _altered(old[name], new[name], same_tags)} | _sampled(stored, present)
    sizes = {name: f"from {old[name].nbytes} to {_bytes(new[name].nbytes)}" for name in resized}
    found = {
        "removed": [f"{name} ({_bytes(old[name].nbytes)})" for name in old if name not in new],
        "added": [f"{name} ({_bytes(new[name].nbytes)})" for name in new if name not in old],
        "resized": [f"{name} ({sizes[name]})" for name in sorted(resized)],
        "altered": sorted(altered - resized),
    }
    return [
        line for what, names in found.items() for line in _cut([f"{what}: {name}" for name in names], what)
    ]


def _sampled(stored: Files, present: Files) -> set[str]:
    """The names of files whose samples differ."""
    return {name for name, text in stored.samples.items() if present.samples.get(name, text) != text}


def _altered(old: Range, new: Range, same_tags: bool) -> bool:
    """Return whether the bytes have changed, if both know them by themselves: a tag may change alone."""
    if old.content is not None and new.content is not None:
        return old.content != new.content
    return same_tags and old.tags != new.tags


def _of_ranges(stored: Files, present: Files, same_tags: bool) -> list[str]:
    pairs = ranges.common(stored.ranges, present.ranges)
    lines = []
    for number, (old, new) in enumerate(pairs):
        change = _change(old, new, same_tags)
        if change:
            end = pairs[number + 1][0].first if number + 1 < len(pairs) else None
            lines.append(f"{_place(min(old.first, new.first), end, len(pairs))}: {change}")
    altered = [f"altered: {name}" for name in sorted(_sampled(stored, present))]
    return [*_cut(lines, "ranges of files"), *_cut(altered, "altered")]


def _place(first: str, end: str | None, count: int) -> str:
    if count == 1:
        return "all files"
    return f"files from {first} on" if end is None else f"files from {first} to before {end}"


def _change(old: Range, new: Range, same_tags: bool) -> str | None:
    if (old.count, old.nbytes) != (new.count, new.nbytes):
        was, now = (f"{each.count} of {_bytes(each.nbytes)} together" for each in (old, new))
        return f"were {was}, and are {now}"
    if old.listing != new.listing:
        return f"some of {old.count} were renamed or replaced by others, or resized"
    if _altered(old, new, same_tags):
        return f"some of {old.count} were altered"
    return None


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"


def _cut(lines: Sequence[str], what: str) -> list[str]:
    left = len(lines) - _MOST
    return list(lines) if left <= 0 else [*lines[:_MOST], f"and {left} more {what}"]
