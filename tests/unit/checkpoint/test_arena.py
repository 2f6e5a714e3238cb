"""The bytes of a safetensors file: their layout, copies and comparisons."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from hvdrecover.checkpoint import arena
from hvdrecover.checkpoint.arena import ITEM_BYTES, PAGE, Arena, TensorSpec, header_size, parse, plan
from tests.unit.checkpoint.roots import CODES, arena_of


def some_tensors():
    random = np.random.default_rng(0)
    tensors = {name: (random.random((3, 5)) * 100).astype(dtype) for dtype, name in CODES.items()}
    return {
        **tensors,
        "scalar": np.array(2.5, dtype="f4"),
        "empty": np.zeros((0, 4), dtype="f8"),
        "also empty": np.zeros((2, 0), dtype="u1"),
        'ünï/"quoted"': np.arange(3, dtype="i2"),
    }


@pytest.mark.parametrize("tensors", [some_tensors(), {}, {"x": np.zeros((0,), dtype="f4")}])
def test_safetensors_reads_our_file_and_so_do_we(tensors, tmp_path):
    file, ours = tmp_path / "ours.safetensors", arena_of(tensors)
    file.write_bytes(ours.buffer.tobytes())
    found = safetensors.numpy.load_file(file)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
    assert Arena.of_file(ours.buffer).layout == ours.layout


def test_every_tensor_is_aligned_and_the_first_begins_on_a_page():
    specs = [TensorSpec(f"{dtype}{count}", dtype, (count,)) for count in (1, 3) for dtype in ITEM_BYTES]
    layout = plan(specs)
    assert len(layout.header) % PAGE == 0
    assert min(layout.offsets.values()) == len(layout.header)
    assert [spec.name for spec in layout.specs if layout.offsets[spec.name] % ITEM_BYTES[spec.dtype]] == []


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_the_format_cannot_hold_are_refused(names):
    with pytest.raises(ValueError, match="'__metadata__'"):
        plan([TensorSpec(name, "U8", (1,)) for name in names])


HEADER = {
    "weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "bias": {"dtype": "I64", "shape": [1], "data_offsets": [16, 24]},
}


def header(content):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [15, 24]},
        {"data_offsets": [0, 8]},
        {"data_offsets": [16.0, 24.0]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [2**64, 2**64 + 8]},
        {"shape": [True]},
        {"shape": [2**62, 2**62]},
        {"shape": [1] * 70},
        {"dtype": "X9"},
    ],
    ids=str,
)
def test_tensors_that_overlap_leave_gaps_or_cannot_be_are_refused(change):
    assert parse(header(HEADER), len(header(HEADER)) + 24).by_name.keys() == HEADER.keys()
    wrong = header({**HEADER, "bias": {**HEADER["bias"], **change}})
    with pytest.raises(ValueError):
        parse(wrong, len(wrong) + 24)


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000, b'{"x": 1}', b"\xff"])
def test_a_header_that_is_not_a_table_of_tensors_is_refused(content):
    with pytest.raises(ValueError):
        parse(header(content), len(header(content)))


def test_a_length_of_a_header_that_cannot_be_is_refused():
    for prefix, size in ((b"1234567", 7), (bytes([255] * 8), 1 << 40), (bytes([9] + [0] * 7), 16)):
        with pytest.raises(ValueError):
            header_size(prefix, size)


LARGE = (1 << 25) + 12_345


@pytest.mark.parametrize("sizes", [[], [1], [LARGE], [LARGE, 1, 0, 77], [1, 0, LARGE], [LARGE // 3] * 4])
def test_all_spans_are_copied_on_however_many_threads(sizes: list[int]) -> None:
    random = np.random.default_rng(0)
    sources = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    targets = [np.zeros_like(source) for source in sources]
    pairs = zip(targets, sources, strict=True)
    arena.copy_spans([(target.ctypes.data, source.ctypes.data, source.nbytes) for target, source in pairs])
    assert all(map(np.array_equal, targets, sources))


def test_an_error_on_either_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(piece: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(arena, "_copy", fail)
    with pytest.raises(MemoryError):
        arena.copy_spans([(0, 0, LARGE)])


def test_without_the_compiled_part_copies_are_made_all_the_same() -> None:
    script = """
import sys
sys.modules["hvdrecover.checkpoint._memcpy"] = None  # an ImportError
from hvdrecover.checkpoint import arena
import numpy as np
assert arena._copy is arena._memmove
source = np.arange(5_000_000)
target = np.zeros_like(source)
arena.copy_spans([(target.ctypes.data, source.ctypes.data, source.nbytes)])
assert (target == source).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_forked_child_has_zeros_and_keeps_its_own_memory_when_it_drops_an_arena() -> None:
    script = """
import mmap, os
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.arena import TensorSpec, plan
hidden, shown = (Arena(plan([TensorSpec("weight", "U8", (1 << 26,))])) for _ in range(2))
for each in (hidden, shown):
    each.bytes_of("weight")[:] = 7
shown.show_to_children()
if (child := os.fork()) == 0:
    assert (shown.bytes_of("weight")[-1], hidden.bytes_of("weight")[-1]) == (7, 0)
    own = mmap.mmap(-1, 1 << 26)
    own[:3] = b"abc"
    del hidden, shown, each
    os._exit(own[:3] != b"abc")
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
