"""The fingerprint of elements that come in an order: of an array, of a data set, of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint.digest import digest

SAMPLES = 256  # elements that are looked at in memory
READ_SAMPLES = 64  # elements that are looked at where each has to be read, decoded or computed first
RANGES = 64  # ranges that elements are divided into when all of them are looked at
UNKNOWN = "unknown"  # a length
_MAX_FACT = 300  # characters


@dataclass(frozen=True)
class Series:
    """The facts known about elements 0, 1, 2, …

    Attributes:
        length: how many there are: a number, ``infinite``, or ``unknown`` as long as not all were looked at.
        element: dtype and shape of one, as text.
        samples: the digest of some, by number.
        step: how many elements a range has, or 0.
        ranges: the digest of each range, if all elements were looked at.
    """

    length: str
    element: str
    samples: Mapping[int, str]
    step: int = 0
    ranges: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        fields = {
            "length": self.length,
            "element": self.element,
            "samples": [list(item) for item in self.samples.items()],
        }
        return {**fields, "step": self.step, "ranges": list(self.ranges)}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Series:
        """The inverse of `as_json`; raises KeyError, TypeError or ValueError for what can't be one."""
        samples = {int(number): str(text) for number, text in fields["samples"]}
        ranges = tuple(str(text) for text in fields["ranges"])
        return Series(str(fields["length"]), str(fields["element"]), samples, int(fields["step"]), ranges)


def fact(text: str, most: int = _MAX_FACT) -> str:
    """A text that is cut, if it has more than ``most`` characters, but still differs from others."""
    return text if len(text) <= most else f"{text[:most]}… {digest(text.encode())[:16]}"


class Ranges:
    """Digests of ranges of elements whose number is not known before the last one has come.

    Elements are joined two by two, then four by four, and so on, so that there are never more than ``most``.

    Attributes:
        step: how many elements a range has.
        count: how many elements have come.
    """

    def __init__(self, most: int = RANGES) -> None:
        self.step = 1
        self._most = most
        self._sums: list[int] = []
        self.count = 0

    def add(self, text: str) -> None:
        """Take in the digest of the next element."""
        if self.count == self._most * self.step:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [(a + b) % 2**128 for a, b in pairs]
            self.step *= 2
        if self.count % self.step == 0:
            self._sums.append(0)
        # With its number, as the sum would not notice elements that changed places.
        self._sums[-1] = (self._sums[-1] + int(digest(f"{self.count}:{text}".encode()), 16)) % 2**128
        self.count += 1

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each range, the last of which may not be full."""
        return tuple(f"{each:032x}" for each in self._sums)


def differences(stored: Series, present: Series) -> list[str]:
    """Return what differs, a line each; the first changed element of those that both have looked at."""
    lines = []
    if stored.length != present.length and UNKNOWN not in (stored.length, present.length):
        lines.append(f"the number of elements was {stored.length}, and is {present.length}")
    if stored.element != present.element:
        # Of other elements all digests differ.
        return [*lines, f"an element was {stored.element}, and is {present.element}"]
    both = sorted(stored.samples.keys() & present.samples.keys())
    changed = [number for number in both if stored.samples[number] != present.samples[number]]
    if changed:
        lines.append(
            f"element {changed[0]} has changed; of {len(both)} that were looked at both times, {len(changed)}"
        )
    return lines + _range_differences(stored, present)


def _range_differences(stored: Series, present: Series) -> list[str]:
    if stored.step != present.step or stored.length != present.length:
        return []
    pairs = enumerate(zip(stored.ranges, present.ranges, strict=False))
    changed = [number for number, (a, b) in pairs if a != b]
    if not changed:
        return []
    start = changed[0] * stored.step
    last = start + stored.step - 1
    if stored.length.isdigit():
        last = min(last, int(stored.length) - 1)
    place = f"element {start}" if start == last else f"elements {start} to {last}"
    ranges = f"{len(changed)} of {len(stored.ranges)} ranges of all elements have changed"
    return [f"{ranges}, the first of them {place}"]
