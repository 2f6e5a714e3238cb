"""Several hosts on one machine, and what they need to log in to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvdrecover.drill.lab import network
from hvdrecover.drill.lab.hosts import Host, make_key
from hvdrecover.drill.lab.network import PATIENCE, ip
from hvdrecover.errors import LabError


class Lab:
    """Hosts, joined by a switch, of a network that nobody else is in. Root only.

    Any number of labs may exist at the same time. All that a lab makes is gone when it is closed, and as well
    when its process is killed: a janitor process sees to it. What a janitor that was killed too has left is
    removed by the next lab.

    Args:
        hosts: how many.

    Attributes:
        number: the lab's own; part of all names and addresses.
        hosts: the hosts, switched on.
        key: file of the private ssh key that opens all of them to root.
        janitor: id of the janitor process.

    Raises:
        LabError: it could not be made.
    """

    def __init__(self, hosts: int = 3) -> None:
        network.sweep()
        self.number, self._claim = network.claim()
        command = [sys.executable, "-m", "hvdrecover.drill.lab.janitor", str(self.number)]
        self._janitor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self._claim.fileno()],
            start_new_session=True,  # out of reach of what ends this process
        )
        self.janitor = self._janitor.pid
        self._folder = network.folder(self.number)
        self.key = self._folder / "key"
        self.hosts = [Host(self.number, number) for number in range(1, hosts + 1)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def ssh_options(self) -> list[str]:
        """Return what to tell ssh, in the words of Horovod, to log in to a host from a host."""
        return [
            "-o",
            "PasswordAuthentication=no",
            "-o",
            "StrictHostKeyChecking=no",
            "-i",
            os.fspath(self.key),
        ]

    def close(self) -> None:
        """Remove everything that the lab made, running processes included.

        Raises:
            LabError: something of it could not be removed.
        """
        _, complaint = self._janitor.communicate(timeout=2 * PATIENCE)  # closes its standard input
        self._claim.close()
        for host in self.hosts:
            host.reap()
        if self._janitor.returncode != 0:
            remedy = "the next lab removes the rest"
            raise LabError(f"lab {self.number}", f"not wholly removed; {remedy}:\n{complaint.decode()}")

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self) -> None:
        self._folder.mkdir(mode=0o700)
        self._make_home()
        switch = network.namespace(self.number, "switch")
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for host in self.hosts:
            others = [other for other in self.hosts if other is not host]
            lines = "".join(f"{other.address} {other.name}\n" for other in others)
            host.install(lines, self._home, self.key.with_suffix(".pub"))
            host.power_on()

    @property
    def _home(self) -> Path:
        """Root's home on all hosts, where ssh finds no keys and settings but these."""
        return self._folder / "home"

    def _make_home(self) -> None:
        make_key(self.key)
        settings = self._home / ".ssh"
        settings.mkdir(mode=0o700, parents=True)
        (settings / "config").write_text(
            "Host *\nIdentityAgent none\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
