"""fsspec's file system over SFTP, of servers only whose host key is known, as ssh has it."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from hvdrecover.errors import ConfigError, HostKeyError

CONFIG = "~/.ssh/config"
FILES = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts")
_REVOKED = "@revoked"


class KnownHostsFileSystem(SFTPFileSystem):  # type: ignore[misc]
    """Files on an SFTP server that proves to be the one that is known; see `connect`.

    Args:
        host: the server.
        known_hosts: a file of host keys, in place of those that ssh looks into.
        ssh_kwargs: as of fsspec's `SFTPFileSystem`.

    Attributes:
        lock: held by who looks whether it is connected, and connects, as fsspec hands one out to all.

    Raises:
        ConfigError: there is no such file.
    """

    def __init__(self, host: str, known_hosts: str | None = None, **ssh_kwargs: Any) -> None:
        if self._cached:
            return
        self.lock = threading.Lock()
        self._files = [Path(name).expanduser() for name in ([known_hosts] if known_hosts else FILES)]
        if known_hosts and not self._files[0].is_file():
            raise ConfigError("known_hosts", f"there is no file '{known_hosts}' of host keys")
        if "host_key_policy" in ssh_kwargs:
            raise ConfigError(
                "host_key_policy", "host keys are always checked; set known_hosts to a file instead"
            )
        super().__init__(host, **ssh_kwargs)

    def _connect(self) -> None:
        """Do nothing yet: fsspec calls this at once, and training continues while the server is away."""
        self.client, self.ftp = paramiko.SSHClient(), None

    def connect(self) -> None:
        """Connect to the server, by what ``~/.ssh/config`` says of the name.

        Raises:
            HostKeyError: the server's key is unknown, another one, or revoked.
            OSError: it can't be reached.
            paramiko.SSHException: it refused.
        """
        known = [entry for path in self._files if path.is_file() for entry in _entries(path)]
        client = paramiko.SSHClient()
        for marker, entry in reversed(known):  # the first one counts
            for name in entry.hostnames if not marker else ():
                client.get_host_keys().add(name, entry.key.get_name(), entry.key)
        client.set_missing_host_key_policy(_Refuse(self._files))
        try:
            host, options = self._as_configured()
            client.connect(host, **options)
            key = client.get_transport().get_remote_server_key()
            if any(marker == _REVOKED and entry.key == key for marker, entry in known):
                raise HostKeyError(
                    self.host, f"its host key, {_print(key)}, is marked as revoked in {_names(self._files)}"
                )
        except paramiko.BadHostKeyException as error:
            client.close()
            raise _changed(error.hostname, error.key, self._files) from error
        except BaseException:
            client.close()
            raise
        self.client, self.ftp = client, client.open_sftp()

    def _as_configured(self) -> tuple[str, dict[str, Any]]:
        """Return the server's own name, and how to connect, by ``~/.ssh/config``; URL and fsspec go first."""
        file = Path(CONFIG).expanduser()
        told = paramiko.SSHConfig.from_path(str(file)).lookup(self.host) if file.is_file() else {}
        keys = [name for name in told.get("identityfile", ()) if Path(name).expanduser().is_file()]
        found = {"username": told.get("user"), "port": int(told.get("port", 0)), "key_filename": keys}
        options = {name: value for name, value in found.items() if value} | self.ssh_kwargs
        host: str = told.get("hostname") or self.host
        command = told.get("proxycommand")
        if (jumps := told.get("proxyjump", "none")) != "none":
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
            f"server. Add it to {self._files[0]} (`{command}` shows it; compare it with what the server's "
            "owner says), or name a file that has it: FSSPEC_SFTP_KNOWN_HOSTS=FILE. Patterns (*, ?) are not "
            "understood there",
        )


def _changed(hostname: str, key: paramiko.PKey, files: list[Path]) -> HostKeyError:
    return HostKeyError(
        hostname,
        f"its host key, {_print(key)}, is another one than that in {_names(files)}: the server was set up "
        f"anew, or this is not it. If it was, take the old key away (`ssh-keygen -R '{hostname}'`) and add "
        "the new one",
    )


def _entries(path: Path) -> Iterator[tuple[str, HostKeyEntry]]:
    """The lines of a file that can be understood, each with its marker or an empty string."""
    for line in path.read_text(errors="replace").splitlines():
        marker, _, rest = line.strip().partition(" ") if line.startswith("@") else ("", "", line.strip())
        with suppress(InvalidHostKey, paramiko.SSHException):
            if rest and not rest.startswith("#") and (entry := HostKeyEntry.from_line(rest)) is not None:
                yield marker, entry


def _print(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.fingerprint}"


def _names(files: list[Path]) -> str:
    return ", ".join(map(str, files))
