"""A checkpoint root in a folder of a POSIX file system."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.storage import direct, unfit
from hvdrecover.checkpoint.storage.descriptors import opened
from hvdrecover.checkpoint.storage.failures import failures
from hvdrecover.checkpoint.storage.interface import TEMPORARY, ReadBytes, Temporary
from hvdrecover.checkpoint.storage.mounted import mount_of

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStorage:
    """A folder of a POSIX file system; files and folders are fsynced."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"

    def check(self) -> None:
        """Make sure that the file system gives what a root needs, as far as its kind tells.

        Raises:
            ConfigError: it does not; two jobs could write to the root.
        """
        there = next(folder for folder in (self._root, *self._root.parents) if folder.exists())
        unfit.refuse(mount_of(there), self.url)

    def names(self, folder: str = "") -> list[str]:
        """Names directly below a folder, sorted; empty if there is no such folder."""
        with failures(self.url, folder, "list the folder"):
            try:
                found = [entry.name for entry in (self._root / folder).iterdir()]
            except FileNotFoundError:
                return []
            # What a process that was killed left of a `publish` is nobody's business.
            return sorted(name for name in found if not name.startswith(TEMPORARY))

    def size(self, path: str) -> int | None:
        """A file's size in bytes, or None if there is no such file."""
        with failures(self.url, path, "look at the file"):
            try:
                status = (self._root / path).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str) -> bytes:
        """A small file's content."""
        with failures(self.url, path, "read the file"):
            return (self._root / path).read_bytes()

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; less only where the file ends."""
        with failures(self.url, path, "read the file"):
            return direct.read(self._root / path, buffer, start)

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file that is durable on return; a crash may leave a part of it."""
        with failures(self.url, path, "write the file"):
            target = self._inside(path)
            self._make_folder(target.parent)
            digest = direct.write(target, buffer)
            _sync_folder(target.parent)
            return digest

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return, and is there either whole or not at all."""
        with failures(self.url, path, "write the file"):
            target = self._inside(path)
            self._place(target, data, os.replace)
            _sync_folder(target.parent)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, unless the file exists: then change nothing and return False."""
        with failures(self.url, path, "create the file"):
            target = self._inside(path)
            try:
                self._place(target, data, _link)
            except FileExistsError:
                if not os.path.lexists(target):  # what exists is a file where a folder should be
                    raise
                return False
            _sync_folder(target.parent)
            return True

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with failures(self.url, path, "delete the file"):
            target = self._inside(path)
            if not os.path.lexists(target):
                return  # which a read-only file system would not say
            target.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # somebody else deletes the folder
                _sync_folder(target.parent)

    def delete(self, folder: str) -> None:
        """Delete a folder and all below it, if it exists."""
        with failures(self.url, folder, "delete the folder"):
            target = self._inside(folder)
            if not os.path.lexists(target):
                return
            while os.path.lexists(target):
                with suppress(FileNotFoundError):  # somebody else deletes it too, and one of us has to end it
                    shutil.rmtree(target)
            _sync_folder(target.parent)

    def temporaries(self) -> list[Temporary]:
        """Return the files that `publish` and `create` are writing, and those that killed processes left."""
        with failures(self.url, "", "look for temporary files"):
            found = []
            for path, folder in self._hidden():
                with suppress(FileNotFoundError):
                    found.append(Temporary(str(path.relative_to(self._root)), folder, path.lstat().st_size))
            return sorted(found)

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Delete the files that killed processes left of `publish` and `create`."""
        with failures(self.url, "", "delete temporary files"):
            for path, folder in self._hidden():
                if stale(folder):
                    path.unlink(missing_ok=True)

    def _hidden(self) -> list[tuple[Path, str]]:
        """Each temporary file, and the name of its folder; empty if it lies at the root itself."""
        if not self._root.is_dir():
            return []
        folders = [entry for entry in self._root.iterdir() if _is_folder(entry)]
        of_folders = [(path, folder.name) for folder in folders for path in folder.glob(f"{TEMPORARY}*")]
        of_root = [(path, "") for path in self._root.glob(f"{TEMPORARY}*")]
        return [(path, folder) for path, folder in of_folders + of_root if not _is_folder(path)]

    def _inside(self, path: str) -> Path:
        """Return where to change something; a folder that may lead out of the root is refused."""
        target = self._root / path
        for folder in target.parents:
            if folder == self._root:
                break
            if folder.is_symlink():
                raise OSError(errno.ELOOP, "the folder is a symbolic link", str(folder))
        return target

    def _place(self, target: Path, data: bytes, place: Callable[[Path, Path], None]) -> None:
        """Write a temporary file and have it put in a target's place."""
        try:
            with self._written_aside(target, data) as temporary:
                place(temporary, target)
        except FileNotFoundError:
            # A process that started just then has tidied up; it does so once.
            with self._written_aside(target, data) as temporary:
                place(temporary, target)

    @contextmanager
    def _written_aside(self, target: Path, data: bytes) -> Iterator[Path]:
        """A temporary file beside a target; gone at the end, unless renamed."""
        self._make_folder(target.parent)
        # Not named after the process: two containers on a shared file system may have the same number.
        temporary = target.with_name(TEMPORARY + uuid.uuid4().hex)
        try:
            _write_new(temporary, data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _make_folder(self, folder: Path) -> None:
        """Make a folder, and the entries that lead to it durable."""
        if folder.is_dir():
            return
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        try:
            _sync_folder(folder.parent)
        except OSError:
            folder.rmdir()  # or the next attempt would find it, and take its entry to be durable
            raise


def _write_new(path: Path, data: bytes) -> None:
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        left = memoryview(data)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)


def _link(temporary: Path, target: Path) -> None:
    """Give a file a second name; unlike a rename, this fails if there is such a name."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            _write_new(target, temporary.read_bytes())  # as exclusive, but a crash may leave a part of it
        except FileExistsError:
            raise
        except OSError:
            target.unlink(missing_ok=True)  # such as of a claim that did not fit: it would be nobody's
            raise


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
