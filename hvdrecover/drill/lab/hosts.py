"""One host of a lab: a network namespace with an interface, a name and an ssh server of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdrecover.drill.lab import network
from hvdrecover.drill.lab.network import PATIENCE, ip, program
from hvdrecover.errors import LabError

INTERFACE = "eth0"


class Host:
    """A host. It shares its files, its process ids and its root user with the machine, but not the network.

    Attributes:
        name: of its network namespace.
        address: its IPv4 address, by which the lab's hosts know each other.
    """

    def __init__(self, lab: int, number: int) -> None:
        self.name = network.namespace(lab, f"h{number}")
        self.address = f"10.77.{lab}.{number}"
        self._switch = network.namespace(lab, "switch")
        self._port = f"port{number}"
        # Its own for good, as a network card's is: the others know the address by it.
        self._card = f"02:77:00:00:{lab:02x}:{number:02x}"
        self._folder = network.folder(lab)
        self._log = self._folder / f"{self.name}.log"
        self._sshd: subprocess.Popen[bytes] | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that runs another one inside the host; the process is the same."""
        return [program("ip"), "netns", "exec", self.name, *command]

    def run(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a process inside the host, with pipes to all three of its standard streams.

        Args:
            command: the program and its arguments.
            environ: variables on top of this process's own.
        """
        return subprocess.Popen(
            self.command(command),
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[int]:
        """The ids of the processes inside the host, its ssh server included; none that has exited."""
        return network.processes(self.name)

    def cut_off(self) -> None:
        """Unplug its cable at the switch: no connection is closed, but nothing gets through."""
        ip("-n", self._switch, "link", "set", self._port, "down")

    def join(self) -> None:
        """Plug the cable in again."""
        ip("-n", self._switch, "link", "set", self._port, "up")

    def power_off(self) -> None:
        """End all of its processes and connections at once, without a word to the others."""
        ip("-n", self._switch, "link", "delete", self._port)  # first, or dying processes close connections
        network.remove_namespace(self.name)
        self.reap()

    def power_on(self) -> None:
        """Start the host: its network and its ssh server, which answers when this returns.

        Raises:
            LabError: it does not start.
        """
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        peer = ["peer", "name", INTERFACE, "address", self._card, "netns", self.name]
        ip("-n", self._switch, "link", "add", self._port, "type", "veth", *peer)
        ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", INTERFACE)
        ip("-n", self.name, "link", "set", INTERFACE, "up")
        self._start_sshd()

    def reap(self) -> None:
        """Wait for the ssh server, which somebody has killed."""
        if self._sshd is not None:
            self._sshd.wait(PATIENCE)

    def install(self, hosts_file: str, home: Path, authorized: Path) -> None:
        """Write what the host needs on disk, once.

        Args:
            hosts_file: the other hosts' lines of its ``/etc/hosts``; its own names are added.
            home: root's home here, for ``~/.ssh`` must be the lab's own; ssh ignores ``$HOME``.
            authorized: file of the public key that may log in.
        """
        files = network.NETNS_FILES / self.name
        files.mkdir(parents=True)
        local = f"127.0.0.1 localhost\n{self.address} {os.uname().nodename} {self.name}\n"
        (files / "hosts").write_text(local + hosts_file)
        others = [
            line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2:3] != ["0"]
        ]
        (files / "passwd").write_text("\n".join([f"root:x:0:0:root:{home}:/bin/sh", *others, ""]))
        (files / "shadow").write_text("root:*:::::::\n")  # sshd turns away a root that is locked with a "!"
        (files / "shadow").chmod(0o600)
        key = self._folder / f"{self.name}.key"
        make_key(key)
        (self._folder / f"{self.name}.conf").write_text(
            f"ListenAddress {self.address}\nPort 22\nHostKey {key}\nAuthorizedKeysFile {authorized}\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxSessions 100\nMaxStartups 100\n"
        )

    def _start_sshd(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as the system's start of sshd does
        sshd = [program("sshd"), "-D", "-e", "-f", os.fspath(self._folder / f"{self.name}.conf")]
        with self._log.open("wb") as log:
            self._sshd = subprocess.Popen(
                self.command(sshd), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + PATIENCE
        while "Server listening" not in self._log.read_text():
            if self._sshd.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"sshd of {self.name}", f"it does not start; it says\n{self._log.read_text()}")
            time.sleep(0.01)


def make_key(path: Path) -> None:
    """Make a pair of ssh keys without a password, ``path`` and ``path.pub``."""
    keygen = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", os.fspath(path)]
    subprocess.run(keygen, check=True)
