"""The changes to Horovod's source that make it build and behave, each with its name and its reason.

An edit replaces one text by another. It must find its text exactly once: a Horovod source in which it doesn't
is not the one that the edit was written for, and is left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import EditError


@dataclass(frozen=True)
class Edit:
    """One named replacement in one file of Horovod's source.

    Attributes:
        name: how messages call it.
        file: the file, relative to the root of the source tree.
        old: the text to replace; it must occur exactly once.
        new: what takes its place.
        why: what goes wrong without it.
    """

    name: str
    file: str
    old: str
    new: str
    why: str


_CPP20 = "the headers of current PyTorch and TensorFlow need C++20"

EDITS: tuple[Edit, ...] = (
    Edit(
        name="c++20",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        why=_CPP20,
    ),
    Edit(
        name="c++20-torch",
        file="horovod/torch/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        why=_CPP20,
    ),
    Edit(
        name="c++20-tensorflow",
        file="horovod/tensorflow/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 17)",
        new="set(CMAKE_CXX_STANDARD 20)",
        why=_CPP20,
    ),
    Edit(
        name="relative-rpath",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD_REQUIRED ON)\n",
        new=(
            "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
            "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
            "set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)\n"
            'set(CMAKE_INSTALL_RPATH "$ORIGIN/../../torch/lib;$ORIGIN/../../tensorflow;'
            '$ORIGIN/../../tensorflow/python;$ORIGIN/../../../..")\n'
        ),
        why=(
            "a wheel must find the frameworks and libmpi of the environment that it is installed in, "
            "not of the one that it was built in; a site's own MPI, CUDA and NCCL come after these"
        ),
    ),
    Edit(
        name="no-xla-ops",
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        why="it includes an XLA header that TensorFlow no longer ships",
    ),
    Edit(
        name="stall-inspector",
        file="horovod/common/gloo/gloo_controller.cc",
        old="global_ranks_.reserve(size_)",
        new="global_ranks_.resize(size_)",
        why="the vector stays empty under Gloo, and so the stall inspector never fires",
    ),
    Edit(
        name="gloo-iface",
        file="horovod/common/gloo/gloo_context.cc",
        old=(
            "  device_attr.iface = gloo_iface_;\n"
            "  device_attr.ai_family = AF_UNSPEC;\n"
            "  auto dev = CreateDevice(device_attr);\n"
            "\n"
            "  global_ctx"
        ),
        new=(
            "  gloo_iface_ = global_context.gloo_iface_;\n"
            "  device_attr.iface = gloo_iface_;\n"
            "  device_attr.ai_family = AF_UNSPEC;\n"
            "  auto dev = CreateDevice(device_attr);\n"
            "\n"
            "  global_ctx"
        ),
        why="process sets ignore HOROVOD_GLOO_IFACE, and hosts whose name means 127.0.0.1 can't connect",
    ),
    Edit(
        name="no-distutils-cmake",
        file="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
        why="Python 3.12 has no distutils",
    ),
    Edit(
        name="no-distutils-runner",
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable",
        new="from shutil import which as find_executable",
        why="Python 3.12 has no distutils, and horovodrun imports this module",
    ),
)


def digest(edits: Iterable[Edit]) -> str:
    """Return a hex digest of what the edits do; names and reasons don't count."""
    parts = [part for edit in edits for part in (edit.file, edit.old, edit.new)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def apply(edits: Iterable[Edit], source_dir: Path) -> None:
    """Apply edits, in order, to a source tree: all of them, or none.

    Args:
        edits: what to change.
        source_dir: the root of the source tree.

    Raises:
        EditError: the text of an edit does not occur exactly once; no file was changed.
    """
    texts: dict[str, str] = {}
    for edit in edits:
        path = source_dir / edit.file
        if edit.file not in texts:
            texts[edit.file] = path.read_bytes().decode() if path.is_file() else ""
        found = texts[edit.file].count(edit.old)
        if found != 1:
            raise EditError(edit.name, edit.file, found)
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    for file, text in texts.items():
        (source_dir / file).write_bytes(text.encode())
