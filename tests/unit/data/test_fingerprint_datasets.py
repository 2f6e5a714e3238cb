import dataclasses
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.data.fingerprint import differences, fingerprint
from hvdrecover.data.fingerprints.series import Ranges
from hvdrecover.data.order import SampleOrder
from hvdrecover.errors import ConfigError


class Numbered:
    """A data set of pairs.

    Attributes:
        read: the numbers of the elements that were asked for.
    """

    def __init__(self, length, change=lambda number, image: image):
        self._length = length
        self._change = change
        self.read = []

    def __len__(self):
        return self._length

    def __getitem__(self, number):
        self.read.append(number)
        image = np.full((2, 3), number, np.float32)
        return {"image": self._change(number, image), "label": number % 10}


class Stream:
    """A data set that is iterated over."""

    def __init__(self, elements):
        self._elements = elements

    def __iter__(self):
        return iter(self._elements)


def at(*numbers):
    return lambda number, image: image + (number in numbers)


# -- by number -----------------------------------------------------------------------------------------


def test_a_data_set_is_compared_by_its_length_and_some_elements():
    data = Numbered(10_000)
    before = fingerprint(data)
    assert len(set(data.read)) == 64
    assert len(data.read) < 80
    assert differences(before, fingerprint(Numbered(10_000))) == []
    assert differences(before, fingerprint(Numbered(10_000, at(0)))) == [
        "element 0 has changed; of 64 that were looked at both times, 1"
    ]
    (line,) = differences(before, fingerprint(Numbered(10_000, at(9_999))))
    assert line.startswith("element 9999 has changed")
    assert (
        differences(before, fingerprint(Numbered(9_999)))[0]
        == "the number of elements was 10000, and is 9999"
    )


def test_every_changed_element_is_found_when_all_are_looked_at():
    before = fingerprint(Numbered(300), full=True)
    for number in range(300):
        lines = differences(before, fingerprint(Numbered(300, at(number)), full=True))
        first, last = map(int, lines[-1].split("elements ")[-1].split(" to "))
        assert first <= number <= last < first + 8


def test_elements_that_changed_places_are_found_when_all_are_looked_at():
    elements = [*range(1000)]
    before = fingerprint(elements, full=True)
    number = next(n for n in range(0, 1000, 16) if not {n, n + 1} & before.content[""].samples.keys())
    elements[number], elements[number + 1] = elements[number + 1], elements[number]
    lines = differences(before, fingerprint(elements, full=True))
    assert lines == [
        f"1 of 63 ranges of all elements have changed, the first of them elements {number} to {number + 15}"
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((1, 2), (1, 3)),
        ((1, 2), (1, 2, 0)),
        ("12", 12),
        (1, 1.0),
        (1, True),
        (None, "None"),
        (b"x", "x"),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1}, {"b": 1}),
        (np.float32(1), np.float64(1)),
        (np.zeros(2), np.zeros((2, 1))),
        (float("nan"), 0.0),
        ([[1], 2], [[1, 2]]),
        ({1: 2}, {"1": 2}),
    ],
)
def test_elements_of_all_kinds_are_told_apart(old, new):
    assert differences(fingerprint([old, 0]), fingerprint([new, 0])) != []
    assert differences(fingerprint([old, 0]), fingerprint([old, 0])) == []


@dataclasses.dataclass
class Sample:
    image: object
    path: Path


def test_elements_may_be_nested_and_equal_ones_are_equal_whatever_holds_them():
    torch = pytest.importorskip("torch")
    image = np.ones((2, 2), np.float32)
    old = [({"b": 2, "a": image}, Sample(image, Path("x"))), "end"]
    new = [[{"a": torch.from_numpy(image), "b": 2}, Sample(torch.from_numpy(image), Path("x"))], "end"]
    assert differences(fingerprint(old), fingerprint(new)) == []


def test_an_image_is_compared_by_its_pixels():
    image = pytest.importorskip("PIL.Image")
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    before = fingerprint([image.fromarray(pixels), "end"])
    assert differences(before, fingerprint([image.fromarray(pixels), "end"])) == []
    assert differences(before, fingerprint([image.fromarray(pixels + 1), "end"])) != []


def test_data_sets_of_torch():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(100.0).reshape(50, 2), torch.arange(50))
    before = fingerprint(data)
    assert (before.kind, before.content[""].element) == ("dataset", "(float32[2], int64[])")
    data.tensors[0][49, 1] = 0
    assert "element 49" in differences(before, fingerprint(data))[0]


def test_a_data_set_of_keras():
    keras = pytest.importorskip("keras")

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, number):
            return np.full((4, 2), number), np.zeros(4)

    before = fingerprint(Batches())
    assert (before.kind, before.content[""].length) == ("dataset", "5")
    assert differences(before, fingerprint(Batches())) == []


# -- randomness ----------------------------------------------------------------------------------------


def test_augmentation_from_global_generators_is_no_change_and_shifts_nothing():
    torch = pytest.importorskip("torch")

    def augmented(number, image):
        return [image + random.random(), image + np.random.rand(), torch.from_numpy(image) + torch.rand(1)]

    def drawn():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    def seed():
        random.seed(5), np.random.seed(6), torch.manual_seed(7)

    seed()
    expected = drawn()
    seed()
    before = fingerprint(Numbered(100, augmented))
    assert drawn() == expected
    assert differences(before, fingerprint(Numbered(100, augmented), full=True)) == []


def test_a_generator_of_its_own_is_refused():
    own = np.random.default_rng()
    with pytest.raises(ConfigError, match=r"^data: element 0 .*shuffled"):
        fingerprint(Numbered(100, lambda number, image: image + own.random()))
    with pytest.raises(ConfigError, match=r"^data: element 0 .*shuffled"):
        fingerprint(ShuffledStream())


class ShuffledStream:
    def __init__(self):
        self._own = np.random.default_rng(0)

    def __iter__(self):
        return iter(self._own.permutation(1000))


# -- streams -------------------------------------------------------------------------------------------


def test_a_stream_is_compared_by_its_first_elements_or_all():
    old = [*range(1000)]
    new = [*range(500), -1, *range(501, 1000)]
    assert differences(fingerprint(Stream(old)), fingerprint(Stream(new))) == []
    (line,) = differences(fingerprint(Stream(old), full=True), fingerprint(Stream(new), full=True))
    assert line == "1 of 63 ranges of all elements have changed, the first of them elements 496 to 511"
    new[63] = -1
    assert "element 63 has changed" in differences(fingerprint(Stream(old)), fingerprint(Stream(new)))[0]


def test_a_longer_stream_is_found_when_all_is_read():
    full = fingerprint(Stream(range(100)), full=True)
    assert differences(full, fingerprint(Stream(range(101)), full=True)) == [
        "the number of elements was 100, and is 101"
    ]
    assert differences(full, fingerprint(Stream(range(101)))) == []


def test_an_infinite_stream_is_read_no_further_than_needed():
    class Endless:
        def __iter__(self):
            return itertools.count()

    assert differences(fingerprint(Endless()), fingerprint(Endless())) == []


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 129, 1000])
def test_ranges_are_few_and_every_element_counts(length):
    def of(elements):
        ranges = Ranges(64)
        for each in elements:
            ranges.add(str(each))
        return ranges

    elements = list(range(length))
    ranges = of(elements)
    assert len(ranges.digests) == -(-length // ranges.step) <= 64
    assert length <= 64 or len(ranges.digests) > 32
    for number in range(length):
        changed = of([*elements[:number], -1, *elements[number + 1 :]])
        differing = [
            n for n, (a, b) in enumerate(zip(ranges.digests, changed.digests, strict=True)) if a != b
        ]
        assert differing == [number // ranges.step]


def test_data_sets_of_tensorflow():
    tf = pytest.importorskip("tensorflow")
    x = np.arange(400, dtype=np.float32).reshape(200, 2)

    def data(x):
        return tf.data.Dataset.from_tensor_slices((x, {"label": tf.range(len(x)), "name": ["n"] * len(x)}))

    before = fingerprint(data(x))
    assert before.kind == "stream"
    assert before.content[""].length == "200"
    assert before.content[""].element == "(float32[2], {label: int32[], name: string[]})"
    assert differences(before, fingerprint(data(x))) == []
    other = x.copy()
    other[63] = 0
    assert "element 63 has changed" in differences(before, fingerprint(data(other)))[0]
    assert differences(before, fingerprint(data(x).batch(7)))[-1] == (
        "an element was (float32[2], {label: int32[], name: string[]}), "
        "and is (float32[None, 2], {label: int32[None], name: string[None]})"
    )
    other = x.copy()
    other[150] = 0
    full = fingerprint(data(x), full=True)
    assert differences(full, fingerprint(data(other))) == []
    assert "elements 148 to 151" in differences(full, fingerprint(data(other), full=True))[0]
    assert "the number of elements" in differences(before, fingerprint(data(x[:100])))[0]
    assert fingerprint(data(x).repeat()).content[""].length == "infinite"
    assert fingerprint(data(x).filter(lambda a, b: True)).content[""].length == "unknown"
    with pytest.raises(ConfigError, match=r"^full: .* repeat\(\)"):
        fingerprint(data(x).repeat(), full=True)
    with pytest.raises(ConfigError, match=r"^data: element \d+ .*shuffled"):
        fingerprint(data(x).shuffle(200))


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [None, 3, b"path", object(), [], (), {}, {1, 2}, {"train": "a/path"}, iter([1]), (n for n in [1]), open],
    ids=lambda data: type(data).__name__,
)
def test_what_is_no_data_is_refused(data):
    with pytest.raises(ConfigError, match=r"^data: .*paths or URLs .* tf.data data set$"):
        fingerprint(data)


def test_a_data_loader_is_refused_and_its_data_set_named():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(5)))
    before = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=r"^data: .*DataLoader .*\.dataset"):
        fingerprint(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_data_that_are_dealt_out_are_refused():
    stream = Stream([1, 2])
    stream.order = SampleOrder(2)
    with pytest.raises(ConfigError, match=r"^data: .*cursor"):
        fingerprint(stream)


def test_an_element_without_bytes_is_named():
    with pytest.raises(ConfigError, match=r"^data: element 1\['x'\]\[0\] .*object"):
        fingerprint([1, {"x": [object()]}])


def test_a_data_set_without_a_length_is_refused():
    class Endless(Numbered):
        def __len__(self):
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"^data: .*Endless .*length"):
        fingerprint(Endless(1))


def test_what_a_data_set_raises_says_where():
    def broken(number, image):
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        fingerprint(Numbered(5, broken))
    assert "reading element 0 of the data set" in caught.value.__notes__[0]


def test_a_data_set_may_be_empty():
    for data in (Numbered(0), Stream([])):
        for full in (False, True):
            taken = fingerprint(data, full=full)
            assert differences(taken, taken) == []
