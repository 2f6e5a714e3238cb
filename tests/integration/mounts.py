"""Small file systems of a test's own, and system calls that fail: real faults of a real kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

Result = TypeVar("Result")
PAGE = 4096


class Disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self, spare: int = 0) -> None:
        self.free()
        with self._ballast.open("xb", buffering=0) as file:
            with contextlib.suppress(OSError):  # until there is none
                while True:
                    file.write(bytes(PAGE))
            os.fsync(file.fileno())
            file.truncate(max(0, os.fstat(file.fileno()).st_size - spare))
            os.fsync(file.fileno())

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def remount(self, option: str) -> None:
        """Mount it anew, ``ro`` or ``rw``."""
        subprocess.run(["mount", "-o", f"remount,{option}", self.folder], check=True)

    def detach(self) -> None:
        """Take it away under whoever uses it."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)


@contextlib.contextmanager
def mounted(kind: str, folder: Path, image: Path, nbytes: int) -> Iterator[Disk]:
    """Mount a file system, ``tmpfs``, ``ramfs`` or ``ext4``, for as long as the block lasts."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", kind]
    if kind == "ext4":
        if not image.exists():
            with image.open("wb") as file:
                file.truncate(nbytes)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        command += ["-o", "loop", str(image), str(folder)]
    else:
        command += ["-o", f"size={nbytes}", kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this machine does not let root mount {kind}: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], capture_output=True)


# Of x86_64; other machines have others.
_NUMBERS = {"read": 0, "pwrite": 18, "preadv2": 327, "fsync": 74, "write": 1, "rename": 82, "unlink": 87}
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h
_LOAD, _SKIP_UNLESS_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # linux/seccomp.h


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def while_failing(call: str, function: Callable[[], Result], code: int = errno.EIO) -> Result:
    """Run a function in a thread whose seccomp filter has one system call fail; it ends with the thread."""
    if platform.machine() != "x86_64":
        pytest.skip(f"the system calls of {platform.machine()} have other numbers")
    outcome: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _forbid(_NUMBERS[call], code)
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def _forbid(number: int, code: int) -> None:
    program = (_Instruction * 4)(
        _Instruction(_LOAD, 0, 0, 0),
        _Instruction(_SKIP_UNLESS_EQUAL, 0, 1, number),
        _Instruction(_RETURN, 0, 0, _ERRNO | code),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (_SET_SECCOMP, _FILTER, ctypes.byref(_Program(4, program)), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            pytest.skip(f"no system call filter here: {os.strerror(ctypes.get_errno())}")
