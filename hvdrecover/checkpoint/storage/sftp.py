"""A checkpoint root on an SFTP server, whose host key must be known.

A file is durable in the same order as on a local disk: data, fsync (``fsync@openssh.com``), rename, fsync of
the folder. A server without that extension is trusted that a closed file is durable. `publish` needs a rename
that replaces (``posix-rename@openssh.com``); `create` uses SFTP's own rename, which does not.

One connection per server and process carries one operation at a time. Any error closes it, since answers may
be missing; the next operation connects again.
"""

from __future__ import annotations

import errno
import shlex
import stat
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import paramiko
from fsspec.implementations.sftp import SFTPFileSystem
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.sftp import CMD_EXTENDED, CMD_VERSION

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.storage.interface import TEMPORARY, ReadBytes, Temporary, failures
from hvdrecover.errors import ConfigError, HostKeyError

CONFIG = "~/.ssh/config"
KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
_FSYNC = "fsync@openssh.com"
_PIECE = 1 << 23  # bytes
_REQUEST = paramiko.SFTPFile.MAX_REQUEST_SIZE  # bytes
_WINDOW = 1 << 24  # bytes that the server may send before it must wait for this process
_KEEPALIVE = 30  # seconds
# Without these, paramiko waits for an hour, or as long as TCP does.
_TIMEOUTS = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), 30.0)  # seconds


class SftpStorage:
    """A folder on an SFTP server.

    Args:
        filesystem: the server, connected or not.
        root: the folder's path on the server.
        url: the root as messages show it, without credentials.
        piece: bytes of a large file that are transferred at a time.
    """

    def __init__(self, filesystem: StrictSftpFileSystem, root: str, url: str, piece: int = _PIECE) -> None:
        self._fs = filesystem
        self._piece = piece
        self._root = root
        self.url = url

    def check(self) -> None:
        """Do nothing: SFTP's rename does not replace, and nothing is cached."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names directly below a folder, sorted; empty if the folder does not exist."""
        with self._session(folder, "list the folder") as session:
            try:
                found = session.listdir(self._path(folder))
            except FileNotFoundError:
                if session.exists(self._path(folder)):
                    raise NotADirectoryError(errno.ENOTDIR, "it is not a folder") from None
                return []
            return sorted(name for name in found if not name.startswith(TEMPORARY))

    def size(self, path: str) -> int | None:
        """Return a file's size in bytes, or None if it does not exist."""
        with self._session(path, "look at the file") as session:
            try:
                status = session.stat(self._path(path))
            except FileNotFoundError:
                return None
            return int(status.st_size) if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str) -> bytes:
        """Return the content of a small file."""
        with self._session(path, "read the file") as session, session.open(self._path(path), "rb") as file:
            data: bytes = file.read()
            return data

    def read_into(self, path: str, buffer: Bytes, start: int = 0) -> ReadBytes:
        """Fill ``buffer`` with a file's bytes from ``start`` on; fewer only at the end of the file."""
        with self._session(path, "read the file") as session, session.open(self._path(path), "rb") as file:
            wanted, digest = buffer[: max(file.stat().st_size - start, 0)], Digest()
            for at in range(0, len(wanted), self._piece):
                piece = wanted[at : at + self._piece]
                parts = [piece[done : done + _REQUEST] for done in range(0, len(piece), _REQUEST)]
                # All requests are sent before the first answer is read. One large read took 4 times longer.
                requests = [(start + at + number * _REQUEST, len(part)) for number, part in enumerate(parts)]
                for part, data in zip(parts, file.readv(requests), strict=True):
                    if len(data) < len(part):
                        raise EOFError("the file became shorter while it was read")
                    part[:] = np.frombuffer(data, dtype=np.uint8)
                digest.update(piece)
            return ReadBytes(len(wanted), digest.hex())

    def write(self, path: str, buffer: Bytes) -> str:
        """Write a file and return its digest. It is durable on return; a crash may leave a part of it."""
        with self._session(path, "write the file") as session:
            target, digest = self._path(path), Digest()
            self._make_parent(session, target)
            with session.open(target, "wb") as file:
                for start in range(0, len(buffer), self._piece):
                    piece = buffer[start : start + self._piece]
                    # All requests are sent without waiting; for the last one, paramiko reads all answers.
                    file.set_pipelined(True)
                    file.write(piece[:-1].data)
                    file.set_pipelined(False)
                    file.write(piece[-1:].data)
                    digest.update(piece)
                session.sync(file)
            session.sync_folder(_parent(target))
            return digest.hex()

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file that is durable on return; readers see all of it or nothing."""
        with self._session(path, "write the file") as session:
            self._place(session, self._path(path), data, session.posix_rename)

    def create(self, path: str, data: bytes) -> bool:
        """Like `publish`, but if the file exists, change nothing and return False."""
        with self._session(path, "create the file") as session:
            target = self._path(path)
            if session.exists(target):
                return False
            try:
                self._place(session, target, data, session.rename)
            except OSError:
                if not session.exists(target):  # servers only say that the rename failed
                    raise
                return False
            return True

    def remove(self, path: str) -> None:
        """Delete a file, if it exists."""
        with self._session(path, "delete the file") as session, suppress(FileNotFoundError):
            self._check_is_folder(session, _parent(self._path(path)))
            session.remove(self._path(path))
            session.sync_folder(_parent(self._path(path)))

    def delete(self, folder: str) -> None:
        """Delete a folder with its content, if it exists."""
        with self._session(folder, "delete the folder") as session, suppress(FileNotFoundError):
            self._check_is_folder(session, self._path(folder))
            session.delete(self._path(folder))
            session.sync_folder(_parent(self._path(folder)))

    def temporaries(self) -> list[Temporary]:
        """Return the temporary files of `publish` and `create`."""
        with self._session("", "look for temporary files") as session:
            return self._temporaries(session)

    def tidy(self, stale: Callable[[str], bool]) -> None:
        """Delete the files that killed processes left of `publish` and `create`."""
        with self._session("", "delete temporary files") as session:
            for found in self._temporaries(session):
                if stale(found.folder):
                    session.remove(self._path(found.path))

    def _temporaries(self, session: _Session) -> list[Temporary]:
        entries = session.listdir_attr(self._root)
        folders = ["", *(entry.filename for entry in entries if stat.S_ISDIR(entry.st_mode))]
        return [
            Temporary(f"{folder}/{entry.filename}".lstrip("/"), folder, entry.st_size or 0)
            for folder in folders
            for entry in (session.listdir_attr(self._path(folder)) if folder else entries)
            if entry.filename.startswith(TEMPORARY) and not stat.S_ISDIR(entry.st_mode)
        ]

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _make_parent(self, session: _Session, target: str) -> None:
        session.make_folder(_parent(target))
        self._check_is_folder(session, _parent(target))

    def _check_is_folder(self, session: _Session, folder: str) -> None:
        """Refuse a symbolic link, which may lead out of the root; the root itself may be one."""
        if folder != self._root and not stat.S_ISDIR(session.lstat(folder).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, or not a folder")

    def _place(self, session: _Session, target: str, data: bytes, rename: Callable[[str, str], None]) -> None:
        """Write a temporary file beside a target, and rename it when it is durable."""
        self._make_parent(session, target)
        temporary = f"{_parent(target)}/{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with session.open(temporary, "wb") as file:
                file.write(data)
                session.sync(file)
            rename(temporary, target)
        except OSError:
            with suppress(OSError):
                session.remove(temporary)
            raise
        session.sync_folder(_parent(target))

    @contextmanager
    def _session(self, path: str, action: str) -> Iterator[_Session]:
        with failures(self.url, path, action), self._fs.session() as session:
            yield session


class _Session(paramiko.SFTPClient):  # type: ignore[misc]
    """An SFTP session with fsync."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._extensions: set[str] = set()
        super().__init__(channel)

    def _read_packet(self) -> tuple[int, bytes]:
        kind, data = super()._read_packet()
        if kind == CMD_VERSION:  # paramiko ignores the server's extensions
            answer = paramiko.Message(data)
            answer.get_int()
            while answer.get_remainder():
                self._extensions.add(answer.get_text())
                answer.get_string()
        return kind, data

    def sync(self, file: paramiko.SFTPFile) -> None:
        """Make a file durable on the server."""
        if _FSYNC in self._extensions:
            self._request(CMD_EXTENDED, _FSYNC, file.handle)

    def sync_folder(self, folder: str) -> None:
        """Make a folder's entries durable, if the server can open folders, as on Linux."""
        try:
            opened = self.open(folder, "r")
        except TimeoutError:
            raise
        except OSError:
            return
        with opened:
            self.sync(opened)

    def exists(self, path: str) -> bool:
        """Return whether there is a file, a folder or a link."""
        try:
            self.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, folder: str) -> None:
        """Make a folder and its parents durable."""
        if self.exists(folder):
            return
        self.make_folder(_parent(folder))
        try:
            self.mkdir(folder)
        except OSError:
            if not self.exists(folder):  # another process made it at the same time
                raise
        self.sync_folder(_parent(folder))

    def delete(self, folder: str) -> None:
        """Delete a folder with its content."""
        for entry in self.listdir_attr(folder):
            path = f"{folder}/{entry.filename}"
            if stat.S_ISDIR(entry.st_mode):
                self.delete(path)
            else:
                self.remove(path)
        self.rmdir(folder)


class StrictSftpFileSystem(SFTPFileSystem):  # type: ignore[misc]
    """fsspec's SFTP, but only with servers whose host key is known, and with the user's ``~/.ssh/config``.

    Args:
        host: the server, or a name in ``~/.ssh/config``.
        known_hosts: a file of host keys, instead of those in `KNOWN_HOSTS`.
        ssh_kwargs: as in fsspec's `SFTPFileSystem`.

    Raises:
        ConfigError: the file does not exist, or a host key policy was given.
    """

    def __init__(self, host: str, known_hosts: str | None = None, **ssh_kwargs: Any) -> None:
        if self._cached:
            return
        self._lock = threading.Lock()  # fsspec shares one file system among all users in the process
        self._files = [Path(name).expanduser() for name in ([known_hosts] if known_hosts else KNOWN_HOSTS)]
        if known_hosts and not self._files[0].is_file():
            raise ConfigError("known_hosts", f"there is no file '{known_hosts}' of host keys")
        if "host_key_policy" in ssh_kwargs:
            raise ConfigError(
                "host_key_policy", "host keys are always checked; set known_hosts to a file instead"
            )
        super().__init__(host, **{**_TIMEOUTS, **ssh_kwargs})

    def _connect(self) -> None:
        """Do not connect yet: fsspec calls this at once, and training continues while the server is away."""
        self.client = paramiko.SSHClient()

    @contextmanager
    def session(self) -> Iterator[_Session]:
        """Return the session, for the calling thread alone; connect first if there is none.

        Raises:
            HostKeyError: the server's key is unknown, has changed or is revoked.
            OSError: the server cannot be reached.
            paramiko.SSHException: the server refused.
        """
        with self._lock:
            transport = self.client.get_transport()
            if transport is None or not transport.is_active():
                self._open_connection()
            try:
                yield self.ftp
            except FileNotFoundError:  # an ordinary answer
                raise
            except BaseException:
                self.client.close()
                raise

    def _open_connection(self) -> None:
        texts = [file.read_text(errors="replace") for file in self._files if file.is_file()]
        lines = [line.split() for text in texts for line in text.splitlines()]
        self.client = paramiko.SSHClient()
        for words in reversed(lines):  # the first line for a name counts
            with suppress(InvalidHostKey, paramiko.SSHException):
                if words and words[0][0] not in "#@" and (entry := HostKeyEntry.from_line(" ".join(words))):
                    for name in entry.hostnames:
                        self.client.get_host_keys().add(name, entry.key.get_name(), entry.key)
        self.client.set_missing_host_key_policy(_Refuse(self._files))
        try:
            host, options = self._as_configured()
            self.client.connect(host, **options)
            transport = self.client.get_transport()
            key = transport.get_remote_server_key()
            if any(words[:1] == ["@revoked"] and key.get_base64() in words for words in lines):
                raise HostKeyError(
                    self.host, f"its host key, {_print(key)}, is marked as revoked in {_names(self._files)}"
                )
            transport.set_keepalive(_KEEPALIVE)
            channel = transport.open_session(_WINDOW, timeout=options["timeout"])
            channel.settimeout(options["timeout"])
            channel.invoke_subsystem("sftp")
            self.ftp = _Session(channel)
        except paramiko.BadHostKeyException as error:
            self.client.close()
            raise HostKeyError(
                error.hostname,
                f"its host key, {_print(error.key)}, differs from the one in {_names(self._files)}: the "
                "server was set up again, or this is another server. If it was set up again, remove the old "
                f"key (`ssh-keygen -R '{error.hostname}'`) and add the new one",
            ) from error
        except BaseException:
            self.client.close()
            raise

    def _as_configured(self) -> tuple[str, dict[str, Any]]:
        """Return the server's address and paramiko's options; the URL overrides ``~/.ssh/config``."""
        file = Path(CONFIG).expanduser()
        told = paramiko.SSHConfig.from_path(str(file)).lookup(self.host) if file.is_file() else {}
        keys = [name for name in told.get("identityfile", ()) if Path(name).expanduser().is_file()]
        found = {"username": told.get("user"), "port": int(told.get("port", 0)), "key_filename": keys}
        options = {name: value for name, value in found.items() if value} | self.ssh_kwargs
        host: str = told.get("hostname") or self.host
        command = told.get("proxycommand")
        if (jumps := told.get("proxyjump", "none")) != "none":  # paramiko knows only ProxyCommand
            *before, last = jumps.split(",")
            words = ["ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes"]
            words += ["-J", ",".join(before)] if before else []
            command = shlex.join([*words, "-W", f"[{host}]:{options.get('port', 22)}", f"ssh://{last}"])
        if command and command != "none":
            options["sock"] = paramiko.ProxyCommand(command)
        return host, options


class _Refuse(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        host, _, port = hostname.removeprefix("[").partition("]:")
        command = f"ssh-keyscan -p {port} {host}" if port else f"ssh-keyscan {host}"
        raise HostKeyError(
            hostname,
            f"its host key, {_print(key)}, is in none of {_names(self._files)}, so this may be another "
            f"server. Add it to {self._files[0]} (`{command}` shows it; compare it with the key that the "
            "server's owner gives you), or name a file that has it: FSSPEC_SFTP_KNOWN_HOSTS=FILE. Patterns "
            "(*, ?) are not understood there",
        )


def _parent(path: str) -> str:
    return path.rsplit("/", 1)[0] or "/"


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def _names(files: list[Path]) -> str:
    return ", ".join(map(str, files))
