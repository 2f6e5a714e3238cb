"""Fingerprints of data sets whose elements are made when they are asked for: by number, or in their order."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from hvdrecover.data.fingerprints.elements import element_digest, outline
from hvdrecover.data.fingerprints.sampling import spread
from hvdrecover.data.fingerprints.series import READ_SAMPLES, UNKNOWN, Ranges, Series, fact
from hvdrecover.errors import ConfigError

_READ_TWICE = 8  # elements, to see whether they are the same each time
_INFINITE = -1  # as tf.data has it


def take_numbered(data: Any, full: bool) -> Series:
    """The fingerprint of something with ``len`` and elements by number.

    While its elements are read, the global generators of Python, numpy and torch are seeded with the
    elements' numbers, and afterwards are what they were. So nothing is drawn from the training's streams.

    Raises:
        ConfigError: it has no length, or gives other elements each time.
    """
    length = _length(data)
    numbers = spread(length, READ_SAMPLES)
    with _own_generators() as seed:
        samples = {number: element_digest(_element(data, number, seed), _name(number)) for number in numbers}
        for number in numbers[:_READ_TWICE]:
            if element_digest(_element(data, number, seed), _name(number)) != samples[number]:
                raise _unsteady(number)
        described = fact(outline(_element(data, 0, seed))) if length else "none"
        if not full:
            return Series(str(length), described, samples)
        ranges = Ranges()
        for number in range(length):
            ranges.add(element_digest(_element(data, number, seed), _name(number)))
    return Series(str(length), described, samples, ranges.step, ranges.digests)


def _length(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(
            "data", f"a {type(data).__name__} without a length can't be told from another; pass what it reads"
        ) from error


def _name(number: int) -> str:
    return f"element {number}"


def _element(data: Any, number: int, seed: Callable[[int], None]) -> Any:
    seed(number)
    try:
        return data[number]
    except Exception as error:
        error.add_note(f"hvdrecover was reading element {number} of the data set for its fingerprint")
        raise


def take_stream(data: Any, full: bool) -> Series:
    """The fingerprint of something that is iterated over from its beginning each time.

    Without ``full``, its first elements are all that is looked at.

    Raises:
        ConfigError: it gives other elements each time, or is to be read to an end that it doesn't have.
    """
    length = _cardinality(data)
    if full and length == "infinite":
        raise ConfigError(
            "full", "the data set is infinite, so not all of it can be looked at; pass it before repeat()"
        )
    with _own_generators() as seed:
        samples = dict(_digests(data, READ_SAMPLES, seed))
        for number, text in _digests(data, _READ_TWICE, seed):
            if samples.get(number) != text:
                raise _unsteady(number)
        described = fact(_described(data, seed))
        if not full:
            return Series(length, described, samples)
        ranges = Ranges()
        for _, text in _digests(data, None, seed):
            ranges.add(text)
    length = str(ranges.count) if length == UNKNOWN else length
    return Series(length, described, samples, ranges.step, ranges.digests)


def _digests(data: Any, most: int | None, seed: Callable[[int], None]) -> Iterator[tuple[int, str]]:
    seed(0)
    for number, element in enumerate(itertools.islice(data, most)):
        yield number, element_digest(element, _name(number))


def _cardinality(data: Any) -> str:
    known = getattr(data, "cardinality", None)
    count = int(known()) if callable(known) else None
    if count is None or count < _INFINITE:
        return UNKNOWN
    return "infinite" if count == _INFINITE else str(count)


def _described(data: Any, seed: Callable[[int], None]) -> str:
    if hasattr(data, "element_spec"):
        return outline(data.element_spec)
    seed(0)
    first = list(itertools.islice(data, 1))
    return outline(first[0]) if first else "none"


def _unsteady(number: int) -> ConfigError:
    return ConfigError(
        "data",
        f"element {number} was another one when it was read again, so changed data can't be told from "
        "chance; pass the data set before it is shuffled and augmented, or the files or arrays that it reads",
    )


@contextmanager
def _own_generators() -> Iterator[Callable[[int], None]]:
    """Have the global generators for oneself; gives what seeds them."""
    torch = sys.modules.get("torch")  # if it was not imported, nothing draws from it
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if torch is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))

        def seed(number: int) -> None:
            random.seed(number)
            np.random.seed(number % 2**32)
            if torch is not None:
                torch.default_generator.manual_seed(number)

        yield seed


class Items:
    """The entries of a mapping of arrays as a data set, in the order of the keys."""

    def __init__(self, items: Mapping[Any, Any]) -> None:
        self._items = items
        self._keys = sorted(items, key=repr)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        key = self._keys[number]
        return key, self._items[key]
