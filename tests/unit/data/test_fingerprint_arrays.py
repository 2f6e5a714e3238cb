import itertools
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.data.fingerprint import Fingerprint, differences, fingerprint
from hvdrecover.data.fingerprints.sampling import spread
from hvdrecover.errors import ConfigError


def noise(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def changed(array, *where):
    copy = array.copy()
    copy[where] += 1
    return copy


# -- equal arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_how_an_array_lies_in_memory_does_not_matter(full):
    array = noise(1000, 6, 5)
    expected = fingerprint(array, full=full)
    padded = np.zeros((1000, 12, 5), np.float32)
    padded[:, ::2] = array
    for other in (
        np.asfortranarray(array),
        padded[:, ::2],
        array[::-1].copy()[::-1],
        array.astype(">f4"),
        np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0),
    ):
        assert fingerprint(other, full=full) == expected


def test_the_fingerprint_never_changes():
    # Commits hold it: taken in another way, it would tell all resumed runs that their data have changed.
    taken = fingerprint(np.arange(12, dtype=np.int32).reshape(3, 4), full=True)
    assert taken.as_json() == {
        "version": 1,
        "kind": "arrays",
        "full": True,
        "content": {
            "": {
                "length": "3",
                "element": "int32[4]",
                "samples": [[0, "5211a8db82521627"], [1, "004e5a280dc947d1"], [2, "e6c866add2e52b75"]],
                "step": 1,
                "ranges": [
                    "5211a8db825216270898ce701a11e56c",
                    "004e5a280dc947d1543edad59503438e",
                    "e6c866add2e52b7538df35323033836a",
                ],
            }
        },
    }


def test_the_order_of_a_dict_does_not_matter():
    x, y = noise(10, 2), noise(10)
    assert fingerprint({"x": x, "y": y}) == fingerprint({"y": y, "x": x})


def test_what_pads_a_structured_dtype_does_not_matter():
    aligned = np.dtype([("label", np.int8), ("value", np.float64)], align=True)
    arrays = []
    for fill in (0, 255):
        array = np.full(10 * aligned.itemsize, fill, np.uint8).view(aligned)
        array["label"], array["value"] = np.arange(10), np.arange(10) / 3
        arrays.append(array)
    assert arrays[0].tobytes() != arrays[1].tobytes()
    for full in (False, True):
        assert fingerprint(arrays[0], full=full) == fingerprint(arrays[1], full=full)
    arrays[1]["value"][9] = 0
    assert differences(fingerprint(arrays[0]), fingerprint(arrays[1])) == [
        "element 9 has changed; of 10 that were looked at both times, 1"
    ]


# -- what has changed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 4999])
def test_a_changed_first_or_last_element_is_found_by_a_glance(at):
    array = noise(5000, 3)
    (line,) = differences(fingerprint(array), fingerprint(changed(array, at, 1)))
    assert line == f"element {at} has changed; of 256 that were looked at both times, 1"


def test_the_lowest_changed_element_that_was_looked_at_is_named():
    array = noise(5000, 3)
    (line,) = differences(fingerprint(array), fingerprint(changed(array, slice(1000, None))))
    lowest = min(number for number in spread(5000, 256) if number >= 1000)
    assert line.startswith(f"element {lowest} has changed; of 256")


@given(st.integers(0, 2**12 - 1), st.integers(0, 63))
def test_every_flipped_bit_is_found_when_all_is_looked_at(at, bit):
    array = noise(2**12, dtype=np.int64)
    before = fingerprint(array.reshape(1024, 4), full=True)
    array[at] ^= np.int64(1) << np.int64(bit)
    line = differences(before, fingerprint(array.reshape(1024, 4), full=True))[-1]
    first, last = map(int, line.split("elements ")[-1].split(" to "))
    assert line.startswith("1 of 64 ranges of all elements")
    assert first <= at // 4 <= last < first + 16


def test_what_a_glance_and_a_full_one_both_know_is_compared():
    array = noise(5000, 3)
    glance, full = fingerprint(array), fingerprint(array, full=True)
    assert differences(glance, full) == differences(full, glance) == []
    assert differences(full, fingerprint(changed(array, 0))) != []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (noise(11, 4), "the number of elements was 10, and is 11"),
        (noise(10, 5), "an element was float32[4], and is float32[5]"),
        (noise(10, 4, dtype=np.int64), "an element was float32[4], and is int64[4]"),
        (noise(10), "an element was float32[4], and is float32[]"),
    ],
)
def test_another_shape_or_dtype_is_named(other, expected):
    assert expected in differences(fingerprint(noise(10, 4)), fingerprint(other))


def test_a_list_of_arrays_says_which_one_has_changed():
    x, y, z = noise(10, 2), noise(10), np.float32(3)
    before = fingerprint({"x": x, "more": [y, z]})
    assert differences(before, fingerprint({"x": x, "more": [changed(y, 4), z]})) == [
        "data['more'][0]: element 4 has changed; of 10 that were looked at both times, 1"
    ]
    assert differences(before, fingerprint({"x": x, "other": y})) == [
        "removed: data['more'][0]",
        "removed: data['more'][1]",
        "added: data['other']",
    ]


def test_arrays_are_no_files():
    lines = differences(fingerprint(noise(3)), fingerprint(__file__))
    assert lines == ["the data were arrays, and are files"]


@pytest.mark.parametrize("shape", [(1, 1 << 21), (1 << 21,), (2, 3, 700_000), (1, 1, 1, 1 << 21)])
def test_of_large_elements_the_first_and_the_last_part_are_looked_at(shape):
    array = noise(*shape)
    before = fingerprint(array)
    for at in (0, -1):
        other = array.copy()
        other.reshape(-1)[at] += 1
        assert differences(before, fingerprint(other)) != []
    other = array.copy()
    other.reshape(-1)[array.size // 3 : array.size // 3 * 2] += 1
    assert differences(before, fingerprint(other)) != []


# -- memory and size -----------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("view", [lambda array: array, lambda array: array.T, lambda array: array[:, ::-1]])
def test_little_is_copied(full, view):
    array = view(np.zeros((4096, 4096), np.float32))
    tracemalloc.start()
    try:
        fingerprint(array, full=full)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < array.nbytes / 4


def test_many_arrays_fit_into_a_manifest():
    arrays = {f"name-{number:03}" * 20: noise(500, seed=number) for number in range(32)}
    taken = fingerprint(arrays, full=True)
    text = json.dumps(taken.as_json())
    assert len(text) < 64 * 1024
    assert Fingerprint.from_json(json.loads(text)) == taken
    assert len(taken.content) == 32


def test_more_arrays_are_elements_of_a_data_set():
    arrays = [noise(3, seed=number) for number in range(40)]
    taken = fingerprint(arrays)
    assert taken.kind == "dataset"
    assert fingerprint(dict(enumerate(arrays))).kind == "dataset"
    (line,) = differences(taken, fingerprint([*arrays[:-1], noise(3)]))
    assert line.startswith("element 39 has changed")


@given(st.integers(0, 10_000), st.integers(2, 300))
def test_chosen_numbers_are_spread_over_all(length, count):
    chosen = spread(length, count)
    assert len(chosen) == len(set(chosen)) == min(length, count)
    assert chosen == sorted(chosen)
    if length:
        assert (chosen[0], chosen[-1]) == (0, length - 1)
        gaps = [b - a for a, b in itertools.pairwise(chosen)]
        assert all(gap <= 2 * -(-length // count) for gap in gaps)


# -- frameworks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.float16, np.complex64])
def test_a_tensor_of_torch_is_the_same_as_an_array(dtype, full):
    torch = pytest.importorskip("torch")
    array = noise(300, 4).astype(dtype)
    expected = fingerprint(array, full=full)
    assert fingerprint(torch.from_numpy(array), full=full) == expected
    assert fingerprint(torch.from_numpy(array.T.copy()).T, full=full) == expected
    assert fingerprint([torch.from_numpy(array)], full=full).content["[0]"] == expected.content[""]


def test_tensors_that_numpy_cannot_hold_as_they_are():
    torch = pytest.importorskip("torch")
    values = torch.arange(600.0).reshape(300, 2)
    for tensor in (values.bfloat16(), values.to(torch.float8_e4m3fn), values.bfloat16().T.contiguous().T):
        other = tensor.clone()
        other[299, 1] = 1
        (line,) = differences(fingerprint(tensor), fingerprint(other))
        assert line.startswith("element 299 has changed")
    assert fingerprint(values.bfloat16()).content[""].element == "bfloat16[2]"
    assert fingerprint(values.clone().requires_grad_()) == fingerprint(values)
    conjugate = torch.complex(values, values).conj()
    assert fingerprint(conjugate) == fingerprint(conjugate.resolve_conj())
    assert fingerprint(torch.tensor(3.0)) == fingerprint(np.float32(3.0))
    with pytest.raises(ConfigError, match=r"^data: data .*layout torch.sparse_coo"):
        fingerprint(values.to_sparse())


@pytest.mark.parametrize("full", [False, True])
def test_a_tensor_of_tensorflow_is_the_same_as_an_array(full):
    tf = pytest.importorskip("tensorflow")
    array = noise(300, 4)
    expected = fingerprint(array, full=full)
    assert fingerprint(tf.constant(array), full=full) == expected
    assert fingerprint(tf.Variable(array), full=full) == expected
    torch = pytest.importorskip("torch")
    halves = torch.from_numpy(array).bfloat16()
    assert fingerprint(tf.cast(array, tf.bfloat16), full=full) == fingerprint(halves, full=full)


@pytest.mark.parametrize("full", [False, True])
def test_strings_of_tensorflow_are_compared_as_texts(full):
    tf = pytest.importorskip("tensorflow")
    texts = [f"text {number}" for number in range(50)]
    before = fingerprint(tf.constant(texts), full=full)
    assert differences(before, fingerprint(tf.constant(texts), full=full)) == []
    texts[49] = "another"
    lines = differences(before, fingerprint(tf.constant(texts), full=full))
    assert lines[0].startswith("element 49 has changed")


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array", [np.array([{}, 3], dtype=object), np.array(["a"], dtype=np.dtypes.StringDType())]
)
def test_arrays_of_objects_are_refused(array):
    with pytest.raises(ConfigError, match=r"^data: data\['x'\] "):
        fingerprint({"x": array})


def test_ragged_tensors_are_refused():
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(ConfigError, match="data"):
        fingerprint(tf.ragged.constant([[1], [2, 3]]))


def test_arrays_without_elements_have_a_fingerprint():
    for full in (False, True):
        empty, some = fingerprint(np.zeros((0, 3)), full=full), fingerprint(np.zeros((2, 3)), full=full)
        assert differences(empty, empty) == []
        assert differences(empty, some) == ["the number of elements was 0, and is 2"]
        assert differences(fingerprint(np.zeros((2, 0)), full=full), some)
