import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.data.fingerprint import Fingerprint, differences, fingerprint
from hvdrecover.data.fingerprints import contents, files
from hvdrecover.data.fingerprints.patterns import fits, leads, split
from hvdrecover.data.fingerprints.places import LocalReader
from hvdrecover.errors import ConfigError, StorageError

MANIFEST_SHARE = 64 * 1024  # bytes


def noise(nbytes, seed=0):
    return random.Random(seed).randbytes(nbytes)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    """Three files, one of them large enough to be sampled in blocks."""
    made = tmp_path / "data"
    (made / "train").mkdir(parents=True)
    (made / "train" / "a.bin").write_bytes(noise(1000, 1))
    (made / "train" / "b.bin").write_bytes(noise(300_001, 2))
    (made / "labels.csv").write_bytes(b"0,1,2\n")
    return made


def taken_small(paths, most, full=False):
    return Fingerprint("files", full, files.take([str(path) for path in paths], full, SYSTEM_CLOCK, most))


def names(taken):
    return [each.first for each in taken.content.ranges]


# -- equal data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_was_moved_copied_and_touched_is_the_same(folder, tmp_path, full):
    before = fingerprint(folder, full=full)
    shutil.copytree(folder, tmp_path / "elsewhere" / "other-name")
    shutil.rmtree(folder)
    after = fingerprint(tmp_path / "elsewhere" / "other-name", full=full)
    assert before == after
    assert differences(before, after) == []


def test_names_are_relative_to_the_folder(folder):
    assert names(fingerprint(folder)) == ["labels.csv", "train/a.bin", "train/b.bin"]


def test_another_process_with_another_hash_seed_sees_the_same(folder):
    program = (
        "import json, sys; from hvdrecover.data.fingerprint import fingerprint\n"
        "print(json.dumps(fingerprint(sys.argv[1], full=True).as_json()))"
    )
    command = [sys.executable, "-c", program, folder]
    printed = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert json.loads(printed[0]) == json.loads(printed[1]) == fingerprint(folder, full=True).as_json()


def test_the_fingerprint_never_changes():
    # Commits hold it: taken in another way, it would tell all resumed runs that their data have changed.
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/never/a": b"abc", "/never/b": bytes(range(256)) * 1000})
    try:
        taken = fingerprint("memory://never", full=True).as_json()["content"]
    finally:
        filesystem.rm("/never", recursive=True)
    assert taken["ranges"] == [
        ["a", 1, 3, "33ebd2d17dfd8c90", None, "1c898f1e1733f9ee48ffd454d0ac1f83"],
        ["b", 1, 256000, "c133e64380c5ce24", None, "fe890cf610159f8771834568afb142e2"],
    ]
    assert taken["samples"] == {"a": "06b05ab6733a6185", "b": "f33ebf66a08d965a"}


def test_the_order_of_the_paths_does_not_matter(folder):
    paths = [folder / "train", folder / "labels.csv"]
    assert fingerprint(paths) == fingerprint(paths[::-1]) == fingerprint(folder)


@pytest.mark.parametrize("made", [str, os.fspath, lambda path: path, lambda path: f"file://{path}"])
def test_a_path_may_be_given_in_several_ways(folder, made):
    assert fingerprint(made(folder)) == fingerprint([made(folder)]) == fingerprint(str(folder))


def test_a_path_may_be_relative(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert fingerprint("data") == fingerprint(folder)


def test_a_file_goes_by_its_name_and_several_by_the_folder_that_all_are_in(folder):
    assert names(fingerprint(folder / "train" / "a.bin")) == ["a.bin"]
    assert names(fingerprint([folder / "train" / "a.bin", folder / "labels.csv"])) == [
        "labels.csv",
        "train/a.bin",
    ]


def test_a_file_that_is_named_twice_counts_once(folder):
    assert fingerprint([folder, folder / "train", folder / "labels.csv"]) == fingerprint(folder)


def test_files_of_two_stores_keep_apart(folder):
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/labels.csv", b"other")
    try:
        taken = fingerprint([folder, "memory://labels.csv"])
    finally:
        filesystem.rm("/labels.csv")
    assert names(taken) == [
        "file://labels.csv", "file://train/a.bin", "file://train/b.bin", "memory://labels.csv"
    ]  # fmt: skip


def test_files_whose_name_is_no_text_are_taken(folder):
    before = fingerprint(folder)
    (folder / os.fsdecode(b"caf\xe9")).write_bytes(b"x")
    after = Fingerprint.from_json(json.loads(json.dumps(fingerprint(folder).as_json())))
    assert differences(before, after) == ["added: caf\\xe9 (1 byte)"]


# -- wildcards -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.csv", ["labels.csv"]),
        ("*", ["labels.csv", "train/a.bin", "train/b.bin"]),
        ("train/?.bin", ["a.bin", "b.bin"]),
        ("*/[!a].bin", ["train/b.bin"]),
        ("**/*.bin", ["train/a.bin", "train/b.bin"]),
        ("tr*", ["train/a.bin", "train/b.bin"]),
    ],
)
def test_wildcards_name_files_and_folders(folder, pattern, expected):
    assert names(fingerprint(folder / pattern)) == expected
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({f"/wild/{name}": b"" for name in ("train/a.bin", "train/b.bin", "labels.csv")})
    try:
        assert names(fingerprint(f"memory://wild/{pattern}")) == expected
    finally:
        filesystem.rm("/wild", recursive=True)


def test_a_name_with_brackets_that_is_there_is_no_pattern(folder):
    (folder / "run[1]").mkdir()
    (folder / "run[1]" / "x").write_bytes(b"")
    assert names(fingerprint(folder / "run[1]")) == ["x"]


@pytest.mark.parametrize(
    ("path", "root", "pattern"),
    [("/a/b*/c", "/a", ("b*", "c")), ("/*", "/", ("*",)), ("bucket/x/**", "bucket/x", ("**",))],
)
def test_a_pattern_begins_after_the_last_plain_folder(path, root, pattern):
    assert split(path) == (root, pattern)


def test_folders_without_what_is_meant_are_not_gone_into():
    assert not leads(("val",), ("train*", "*.tar"))
    assert leads(("train1", "deep"), ("train*",))
    assert leads(("x", "y"), ("**", "z"))
    assert not fits(("train1",), ("train*", "*.tar"))


# -- what has changed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_every_kind_of_change_is_named(folder, full):
    before = fingerprint(folder, full=full)
    (folder / "labels.csv").rename(folder / "names.csv")
    flip(folder / "train" / "a.bin", 500)
    (folder / "train" / "b.bin").write_bytes(noise(300_000, 2))
    (folder / "train" / "c.bin").write_bytes(b"new")
    assert differences(before, fingerprint(folder, full=full)) == [
        "removed: labels.csv (6 bytes)",
        "added: names.csv (6 bytes)",
        "added: train/c.bin (3 bytes)",
        "resized: train/b.bin (from 300001 to 300000 bytes)",
        "altered: train/a.bin",
    ]


def test_two_files_that_changed_places_are_both_altered(folder):
    (folder / "x").write_bytes(b"one")
    (folder / "y").write_bytes(b"two")
    before = [fingerprint(folder, full=full) for full in (False, True)]
    joined = taken_small([folder], 1, full=True)
    (folder / "x").write_bytes(b"two")
    (folder / "y").write_bytes(b"one")
    for full in (False, True):
        assert differences(before[full], fingerprint(folder, full=full)) == ["altered: x", "altered: y"]
    assert "altered" in differences(joined, taken_small([folder], 1, full=True))[0]


@pytest.mark.parametrize("at", [0, 299_999])
def test_a_changed_first_or_last_byte_of_a_large_file_is_found_by_a_glance(tmp_path, at):
    (tmp_path / "large").write_bytes(noise(300_000))
    before = fingerprint(tmp_path)
    flip(tmp_path / "large", at)
    assert differences(before, fingerprint(tmp_path)) == ["altered: large"]


def test_a_glance_reads_little_of_a_large_file():
    for size in (1 << 17, 10**9, 10**12):
        chosen = contents.blocks(size)
        assert (chosen[0][0], chosen[-1][1]) == (0, size)
        assert sum(end - start for start, end in chosen) < 60 * 4096
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(chosen))


@given(
    data=st.binary(min_size=1, max_size=200_000),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_every_flipped_bit_is_found_when_all_is_read(tmp_path_factory, data, where, bit):
    path = tmp_path_factory.mktemp("flip") / "file"
    path.write_bytes(data)
    before = fingerprint(path, full=True)
    changed = bytearray(data)
    changed[int(where * len(data))] ^= 1 << bit
    path.write_bytes(changed)
    assert differences(before, fingerprint(path, full=True)) == ["altered: file"]


def test_every_byte_counts_in_a_file_of_several_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalReader, "buffer", 1000)
    (tmp_path / "file").write_bytes(noise(2500))
    before = fingerprint(tmp_path / "file", full=True)
    for at in range(0, 2500, 50):
        flip(tmp_path / "file", at)
        assert differences(before, fingerprint(tmp_path / "file", full=True)) == ["altered: file"]
        flip(tmp_path / "file", at)
    assert before == fingerprint(tmp_path / "file", full=True)


def test_a_glance_and_a_full_one_are_compared_by_what_both_know(folder):
    glance, full = fingerprint(folder), fingerprint(folder, full=True)
    assert differences(glance, full) == differences(full, glance) == []
    flip(folder / "train" / "a.bin", 3)
    assert differences(glance, fingerprint(folder, full=True)) == ["altered: train/a.bin"]
    assert differences(full, fingerprint(folder)) == ["altered: train/a.bin"]


def test_long_lists_are_cut(folder):
    before = fingerprint(folder)
    for number in range(25):
        (folder / f"new-{number:02}").write_bytes(b"")
    lines = differences(before, fingerprint(folder))
    assert lines[:2] == ["added: new-00 (0 bytes)", "added: new-01 (0 bytes)"]
    assert (len(lines), lines[-1]) == (11, "and 15 more added")


# -- many files ----------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    """3,000 small files in 30 folders, of which the samples take in some."""
    for number in range(3000):
        path = tmp_path / "many" / f"class-{number // 100:02}" / f"image-{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise(10, number))
    return tmp_path / "many"


def test_the_fingerprint_of_many_files_fits_into_a_manifest(many):
    taken = fingerprint(many, full=True)
    assert len(json.dumps(taken.as_json())) < MANIFEST_SHARE
    assert not taken.content.exact
    assert taken.content.count == sum(each.count for each in taken.content.ranges) == 3000
    assert Fingerprint.from_json(json.loads(json.dumps(taken.as_json()))) == taken


@pytest.mark.parametrize("most", [1, 300, 5000, 40_000])
def test_the_limit_is_kept(many, most):
    taken = taken_small([many], most)
    kept = len(json.dumps(taken.as_json()["content"]["ranges"]))
    assert len(taken.content.ranges) == 1 or most / 8 < kept <= most


def changed_among_many(many, change, full=False):
    before = fingerprint(many, full=full)
    change()
    lines = differences(before, fingerprint(many, full=full))
    assert lines == differences_json(before, many, full)
    return lines


def differences_json(before, many, full):
    return differences(
        Fingerprint.from_json(json.loads(json.dumps(before.as_json()))), fingerprint(many, full=full)
    )


def encloses(line, name):
    """Return whether the range that a line names is a small one around a name."""
    first, _, end = line.split(": ")[0].removeprefix("files from ").partition(" to before ")
    return first <= name < end and first.split("/")[0] <= "class-13" and end.split("/")[0] >= "class-12"


def test_a_file_that_came_among_many_is_narrowed_down(many):
    (line,) = changed_among_many(many, lambda: (many / "class-12" / "image-01250x.png").write_bytes(b"xyz"))
    assert encloses(line, "class-12/image-01250x.png")
    was, now = line.split("were ")[1].split(" together, and are ")
    assert int(now.split()[0]) == int(was.split()[0]) + 1


def test_a_file_that_went_from_among_many_is_narrowed_down(many):
    gone = "class-12/image-01250.png"
    lines = [line for line in changed_among_many(many, (many / gone).unlink) if line.startswith("files")]
    assert len(lines) == 1
    assert encloses(lines[0], gone)


def test_a_file_that_was_renamed_among_many_is_narrowed_down(many):
    old = many / "class-12" / "image-01250.png"
    lines = changed_among_many(many, lambda: old.rename(old.with_name("image-01250-new.png")))
    assert len(lines) == 1
    assert "renamed" in lines[0]
    assert encloses(lines[0], "class-12/image-01250.png")


def test_a_file_that_was_altered_among_many_is_narrowed_down_when_all_is_read(many):
    lines = changed_among_many(many, lambda: flip(many / "class-12" / "image-01250.png", 5), full=True)
    assert "altered" in lines[0]
    assert encloses(lines[0], "class-12/image-01250.png")


def test_the_first_and_the_last_file_are_always_looked_into(many):
    for number in range(3):  # one name might be among the others by chance
        (many / f"z-{number}").write_bytes(b"last")
        samples = fingerprint(many).content.samples
        assert {"class-00/image-00000.png", f"z-{number}"} < samples.keys()
        assert 100 < len(samples) <= 128


def test_files_that_came_leave_the_samples_of_others_comparable(many):
    before = fingerprint(many)
    for number in range(40):
        (many / "class-29" / f"new-{number}").write_bytes(b"x")
    after = fingerprint(many)
    assert before.content.samples != after.content.samples
    assert len(before.content.samples.keys() & after.content.samples.keys()) > 100
    assert [line for line in differences(before, after) if "altered" in line] == []


def test_all_files_of_a_sample_altered_are_named(many):
    before = fingerprint(many)
    for path in sorted(path for path in many.rglob("*") if path.is_file()):
        flip(path, 0)
    lines = differences(before, fingerprint(many))
    assert lines[0] == "altered: class-00/image-00000.png"
    assert lines[-1] == f"and {len(before.content.samples) - 10} more altered"


def test_a_list_of_files_and_one_of_ranges_are_compared_by_ranges(many):
    listed, joined = taken_small([many], 10**6), taken_small([many], 5000)
    assert listed.content.exact and not joined.content.exact
    assert differences(listed, joined) == differences(joined, listed) == []
    (many / "class-12" / "image-01250.png").write_bytes(b"other size")
    (many / "class-12" / "image-01251.png").write_bytes(b"longer than it was")
    lines = differences(joined, taken_small([many], 10**6))
    assert len([line for line in lines if line.startswith("files")]) == 1


@given(
    old=st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=60),
    new=st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=60),
    limits=st.tuples(st.sampled_from([1, 500, 1500, 10**6]), st.sampled_from([1, 500, 1500, 10**6])),
)
def test_lists_differ_if_and_only_if_their_ranges_do(old, new, limits):
    sides = []
    for found, most in zip((old, new), limits, strict=True):
        kept = [files.ranges.of(files.File(name, len(name), None, None)) for name in sorted(found)]
        exact, joined = files.bounded(kept, most)
        content = files.Files(len(kept), sum(each.nbytes for each in kept), None, exact, tuple(joined), {})
        sides.append(Fingerprint("files", False, content))
    assert (differences(*sides) == []) == (old == new)


# -- links and what is not a file -----------------------------------------------------------------------


def test_links_are_followed(folder, tmp_path):
    (tmp_path / "linked").mkdir()
    for name in ("train", "labels.csv"):
        (tmp_path / "linked" / name).symlink_to(folder / name)
    (tmp_path / "whole").symlink_to(folder)
    assert fingerprint(tmp_path / "linked") == fingerprint(tmp_path / "whole") == fingerprint(folder)


def test_links_in_a_circle_have_an_end(folder):
    (folder / "train" / "up").symlink_to(folder)
    (folder / "train" / "self").symlink_to(folder / "train")
    assert names(fingerprint(folder)) == ["labels.csv", "train/a.bin", "train/b.bin"]


def test_folders_linked_to_each_other_have_an_end(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"")
        (tmp_path / name / "other").symlink_to(tmp_path / other)
    assert names(fingerprint(tmp_path)) == ["a/file", "a/other/file", "b/file", "b/other/file"]


def test_a_link_to_nothing_is_refused(folder):
    (folder / "gone").symlink_to(folder / "nowhere")
    for path in (folder, folder / "gone"):
        with pytest.raises(ConfigError, match=r"^data: '.*gone' .*link"):
            fingerprint(path)


def test_what_is_neither_a_file_nor_a_folder_is_refused(folder):
    os.mkfifo(folder / "pipe")
    for path in (folder, folder / "pipe"):
        with pytest.raises(ConfigError, match=r"^data: '.*pipe' "):
            fingerprint(path)
    (folder / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
        with pytest.raises(ConfigError, match=r"^data: '.*socket' "):
            fingerprint(folder)


# -- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["nowhere", "nowhere/*.tar", "memory://nowhere", "memory://nowhere/**"])
def test_where_nothing_is_the_path_is_named(folder, monkeypatch, url):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"^data: .*'.*nowhere"):
        fingerprint([str(folder), url])


def test_an_empty_folder_is_refused(folder):
    (folder / "mount").mkdir()
    with pytest.raises(ConfigError, match=r"^data: .*'.*mount'.* mounted"):
        fingerprint(folder / "mount")


def test_an_unknown_protocol_is_refused_without_its_password():
    with pytest.raises(ConfigError, match=r"^data: 'nosuch://host/x' ") as caught:
        fingerprint("nosuch://user:secret@host/x")
    assert "secret" not in str(caught.value)


def test_a_file_that_is_cut_short_meanwhile_is_a_storage_error(folder):
    place = files.look(str(folder), SYSTEM_CLOCK)
    entry = next(each for each in place.entries if each.path == "train/b.bin")
    (folder / "train" / "b.bin").write_bytes(b"short")
    found = contents.Found("train/b.bin", entry, place.reader)
    with pytest.raises(StorageError, match=r"train/b\.bin: .*shorter"):
        list(contents.contents([found]))
    (folder / "train" / "b.bin").unlink()
    with pytest.raises(StorageError, match=r"train/b\.bin: .*No such file"):
        contents.samples([found])


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: [],
        lambda fields: {},
        lambda fields: {**fields, "kind": "soup"},
        lambda fields: {**fields, "version": "new"},
        lambda fields: {**fields, "content": {**fields["content"], "ranges": [["a"]]}},
        lambda fields: {
            **fields,
            "content": {**fields["content"], "ranges": [["a", 1, 1, None, None, None]]},
        },
        lambda fields: {**fields, "content": {**fields["content"], "samples": 3}},
        lambda fields: {**fields, "kind": "arrays"},
    ],
)
def test_nonsense_is_refused(folder, change):
    with pytest.raises(ConfigError, match=r"^fingerprint: "):
        Fingerprint.from_json(change(fingerprint(folder).as_json()))


def test_one_of_a_newer_version_is_refused_and_unknown_fields_are_passed_over(folder):
    taken = fingerprint(folder)
    fields = taken.as_json()
    fields["later"] = fields["content"]["later"] = 1
    fields["content"]["ranges"] = [[*row, "later"] for row in fields["content"]["ranges"]]
    assert Fingerprint.from_json(fields) == taken
    with pytest.raises(ConfigError, match=r"^fingerprint: .* version 2, .* 1; upgrade"):
        Fingerprint.from_json({**fields, "version": 2})
