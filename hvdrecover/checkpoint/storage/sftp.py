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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import paramiko
from fsspec.implementations.sftp import SFTPFileSystem
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.sftp import CMD_EXTENDED, CMD_VERSION

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.storage import TEMPORARY, Storage, Temporary, failures
from hvdrecover.checkpoint.storage.remote import RemoteStorage
from hvdrecover.errors import ConfigError, HostKeyError

CONFIG = "~/.ssh/config"
KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
_FSYNC = "fsync@openssh.com"
_REQUEST = paramiko.SFTPFile.MAX_REQUEST_SIZE  # bytes
_WINDOW = 1 << 24  # bytes that the server may send before it must wait for this process
_KEEPALIVE = 30  # seconds
# Without these, paramiko waits for an hour, or as long as TCP does.
_TIMEOUTS = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), 30.0)  # seconds


class SftpStorage(RemoteStorage):
    """A folder on an SFTP server, which need not be connected yet."""

    piece = 1 << 23

    @property
    def _session(self) -> _Session:
        return self._fs.ftp  # type: ignore[no-any-return]

    def check(self) -> None:
        pass  # SFTP's rename does not replace, and nothing is cached

    @contextmanager
    def _failures(self, path: str, action: str) -> Iterator[None]:
        with failures(self.url, path, action), self._fs.connected():
            yield

    def _read_pieces(self, path: str, buffer: Bytes, start: int) -> Iterator[tuple[Bytes, int]]:
        with self._session.open(self._path(path), "rb") as file:
            wanted = buffer[: max(file.stat().st_size - start, 0)]
            for at in range(0, len(wanted), self.piece):
                piece = wanted[at : at + self.piece]
                parts = [piece[done : done + _REQUEST] for done in range(0, len(piece), _REQUEST)]
                # All requests are sent before the first answer is read. One large read took 4 times longer.
                requests = [(start + at + number * _REQUEST, len(part)) for number, part in enumerate(parts)]
                for part, data in zip(parts, file.readv(requests), strict=True):
                    if len(data) < len(part):
                        raise EOFError("the file became shorter while it was read")
                    part[:] = np.frombuffer(data, dtype=np.uint8)
                yield piece, len(piece)

    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        target = self._path(path)
        self._make_folder(_parent(target))
        with self._session.open(target, "wb") as file:
            for start in range(0, len(buffer), self.piece):
                piece = buffer[start : start + self.piece]
                # All requests are sent without waiting; for the last one, paramiko reads all answers.
                file.set_pipelined(True)
                file.write(piece[:-1].data)
                file.set_pipelined(False)
                file.write(piece[-1:].data)
                yield piece
            self._session.sync(file)
        self._sync_folder(_parent(target))

    def _publish(self, path: str, data: bytes, *, exclusive: bool) -> bool:
        target = self._path(path)
        if exclusive and self._mode(target):
            return False
        self._make_folder(_parent(target))
        temporary = f"{_parent(target)}/{TEMPORARY}{uuid.uuid4().hex}"
        try:
            with self._session.open(temporary, "wb") as file:
                file.write(data)
                self._session.sync(file)
            (self._session.rename if exclusive else self._session.posix_rename)(temporary, target)
        except OSError:
            with suppress(OSError):
                self._session.remove(temporary)
            if exclusive and self._mode(target):  # servers only say that the rename failed
                return False
            raise
        self._sync_folder(_parent(target))
        return True

    def _remove(self, path: str) -> None:
        target = self._path(path)
        if self._mode(target):
            self._check_is_folder(_parent(target))
            self._session.remove(target)
            self._sync_folder(_parent(target))

    def _delete(self, folder: str) -> None:
        target = self._path(folder)
        if self._mode(target):
            self._check_is_folder(target)
            self._delete_tree(target)
            self._sync_folder(_parent(target))

    def _delete_tree(self, folder: str) -> None:
        for entry in self._session.listdir_attr(folder):
            path = f"{folder}/{entry.filename}"
            (self._delete_tree if stat.S_ISDIR(entry.st_mode) else self._session.remove)(path)
        self._session.rmdir(folder)

    def _temporaries(self) -> list[Temporary]:
        return Storage._temporaries(self)

    def _mode(self, path: str) -> int:
        """Return the mode of a file, a folder or a link; 0 if there is none."""
        try:
            return self._session.lstat(path).st_mode  # type: ignore[no-any-return]
        except FileNotFoundError:
            return 0

    def _check_is_folder(self, folder: str) -> None:
        """Refuse a symbolic link, which may lead out of the root; the root itself may be one."""
        if folder.startswith(f"{self._root}/") and not stat.S_ISDIR(self._mode(folder)):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, or not a folder")

    def _make_folder(self, folder: str) -> None:
        if not self._mode(folder):
            self._make_folder(_parent(folder))
            try:
                self._session.mkdir(folder)
            except OSError:
                if not self._mode(folder):  # another process made it at the same time
                    raise
            self._sync_folder(_parent(folder))
        self._check_is_folder(folder)

    def _sync_folder(self, folder: str) -> None:
        try:
            opened = self._session.open(folder, "r")
        except TimeoutError:
            raise
        except OSError:  # only servers on Linux can open folders
            return
        with opened:
            self._session.sync(opened)


class _Session(paramiko.SFTPClient):  # type: ignore[misc]
    """An SFTP session with fsync."""

    _can_sync = False

    def _read_packet(self) -> tuple[int, bytes]:
        kind, data = super()._read_packet()
        if kind == CMD_VERSION:  # paramiko ignores the list of the server's extensions
            self._can_sync = _FSYNC.encode() in data
        return kind, data

    def sync(self, file: paramiko.SFTPFile) -> None:
        if self._can_sync:
            self._request(CMD_EXTENDED, _FSYNC, file.handle)


class StrictSftpFileSystem(SFTPFileSystem):  # type: ignore[misc]
    """fsspec's SFTP, but only with servers whose host key is known, and with ``~/.ssh/config``."""

    def __init__(self, host: str, known_hosts: str | None = None, **ssh_kwargs: Any) -> None:
        if self._cached:
            return
        self._lock = threading.Lock()  # fsspec shares one file system among all users in the process
        self._files = [Path(name).expanduser() for name in ([known_hosts] if known_hosts else KNOWN_HOSTS)]
        self._shown = ", ".join(map(str, self._files))
        if known_hosts and not self._files[0].is_file():
            raise ConfigError("known_hosts", f"there is no file '{known_hosts}' of host keys")
        if "host_key_policy" in ssh_kwargs:
            problem = "host keys are always checked; set known_hosts to a file instead"
            raise ConfigError("host_key_policy", problem)
        super().__init__(host, **{**_TIMEOUTS, **ssh_kwargs})

    def _connect(self) -> None:
        """Do not connect yet: fsspec calls this at once, and training continues while the server is away."""
        self.client = paramiko.SSHClient()

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Give the calling thread the session `ftp` for itself; connect first if there is none."""
        with self._lock:
            try:
                transport = self.client.get_transport()
                if transport is None or not transport.is_active():
                    self._open_connection()
                yield
            except FileNotFoundError:  # an ordinary answer
                raise
            except BaseException:
                self.client.close()
                raise

    def _open_connection(self) -> None:
        self.client = paramiko.SSHClient()
        self.client.set_missing_host_key_policy(self)
        texts = [file.read_text(errors="replace") for file in self._files if file.is_file()]
        lines = [line.split() for text in texts for line in text.splitlines()]
        for words in reversed(lines):  # the first line for a name counts
            with suppress(InvalidHostKey, paramiko.SSHException):  # paramiko's own loader would fail
                if words and words[0][0] not in "#@" and (entry := HostKeyEntry.from_line(" ".join(words))):
                    for name in entry.hostnames:
                        self.client.get_host_keys().add(name, entry.key.get_name(), entry.key)
        host, options = self._as_configured()
        try:
            self.client.connect(host, **options)
        except paramiko.BadHostKeyException as error:
            raise HostKeyError(
                error.hostname,
                f"its host key, {_print(error.key)}, differs from the one in {self._shown}: the "
                "server was set up again, or this is another server. If it was set up again, remove the old "
                f"key (`ssh-keygen -R '{error.hostname}'`) and add the new one",
            ) from error
        transport = self.client.get_transport()
        key = transport.get_remote_server_key()
        if any(words[:1] == ["@revoked"] and key.get_base64() in words for words in lines):
            problem = f"its host key, {_print(key)}, is marked as revoked in {self._shown}"
            raise HostKeyError(self.host, problem)
        transport.set_keepalive(_KEEPALIVE)
        channel = transport.open_session(_WINDOW, timeout=options["timeout"])
        channel.settimeout(options["timeout"])
        channel.invoke_subsystem("sftp")
        self.ftp = _Session(channel)

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

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        host, _, port = hostname.removeprefix("[").partition("]:")
        command = f"ssh-keyscan -p {port} {host}" if port else f"ssh-keyscan {host}"
        raise HostKeyError(
            hostname,
            f"its host key, {_print(key)}, is in none of {self._shown}, so this may be another "
            f"server. Add it to {self._files[0]} (`{command}` shows it; compare it with the key that the "
            "server's owner gives you), or name a file that has it: FSSPEC_SFTP_KNOWN_HOSTS=FILE. Patterns "
            "(*, ?) are not understood there",
        )


def _parent(path: str) -> str:
    return path.rsplit("/", 1)[0] or "/"


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"
