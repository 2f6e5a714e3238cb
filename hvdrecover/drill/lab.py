"""Several hosts on this machine: network namespaces that can be cut off and lose their power. Root only.

Every name that a lab makes carries the lab's number, so all of it can be found and removed. A lab uses only
its own network namespaces, the one of the bridge included: it does not touch the machine's network.

``python -m hvdrecover.drill.lab NUMBER`` is the janitor of a lab. It waits for the end of its standard input,
a pipe that only the process of the lab holds open, and then removes the lab. The folder goes last: while it
exists, no other lab takes the number.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdrecover import config
from hvdrecover.errors import LabError

INTERFACE = "eth0"
PACKAGES = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
_PATIENCE = 30.0  # seconds to wait for anything
_PRIVILEGED = "the machine, or its container, must let root change networks (--privileged)"
_NETNS_FILES = Path("/etc/netns")  # `ip netns exec NAME` mounts the files of NAME in here over those of /etc
_NAMESPACES = Path("/run/netns")
_NUMBERS = range(1, 255)  # the third byte of a lab's addresses
_TRIAL = "{0} link add name switch type bridge && {0} link add name port1 type veth peer name eth0"


# -- requirements of a lab ---------------------------------------------------------------------------------


def lacks() -> str:
    """Return why there can be no lab here, with the remedy; '' if there can."""
    if os.geteuid() != 0:
        return "only root can make hosts; start it by sudo"
    if absent := sorted({package for name, package in PACKAGES.items() if find(name) is None}):
        return f"it needs missing programs; apt-get install {' '.join(absent)}"
    # A trial in namespaces that end with the trial; the kernel complains if it does not allow them.
    command = ["unshare", "--net", "--mount", "sh", "-c", _TRIAL.format(program("ip"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"this machine does not let root make hosts: {done.stderr.strip()}; {_PRIVILEGED}"
    return ""


def find(name: str) -> str | None:
    searched = config.environment().get("PATH", "")
    return shutil.which(name, path=f"{searched}:/usr/sbin:/sbin")  # the PATH of a user lacks these two


def program(name: str) -> str:
    if (path := find(name)) is None:
        raise LabError(name, f"the program is missing; apt-get install {PACKAGES.get(name, name)}")
    return path


def _ip(*arguments: str) -> None:
    done = subprocess.run([program("ip"), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise LabError(f"ip {' '.join(arguments)}", f"{done.stderr.strip()}; {_PRIVILEGED}")


# -- the lab -----------------------------------------------------------------------------------------------


class Lab:
    """Hosts in a private network; a janitor removes them when the lab is closed or its process is killed."""

    def __init__(self, hosts: int = 3) -> None:
        self.number = _claim_a_number()
        command = [sys.executable, "-m", "hvdrecover.drill.lab", str(self.number)]
        pipe = subprocess.PIPE
        # In its own session: signals to this process's group must not reach the janitor.
        self._janitor = subprocess.Popen(command, stdin=pipe, stderr=pipe, start_new_session=True)
        self.folder = _folder(self.number)
        self.key = self.folder / "key"  # the private ssh key that lets root in everywhere
        self.hosts = [Host(self.number, number) for number in range(1, hosts + 1)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        _, complaint = self._janitor.communicate(timeout=2 * _PATIENCE)  # closes its standard input
        for host in self.hosts:
            host.reap()
        if self._janitor.returncode != 0:
            raise LabError(f"lab {self.number}", f"not completely removed:\n{complaint.decode()}")

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make(self) -> None:
        _make_key(self.key)
        settings = self.folder / "home" / ".ssh"
        settings.mkdir(mode=0o700, parents=True)
        (settings / "config").write_text(
            "Host *\nIdentityAgent none\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
        )
        switch = _namespace(self.number, "switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in self.hosts:
            host.install([other for other in self.hosts if other is not host])
            host.power_on()


class Host:
    """A host of a lab. It shares files, process ids and root with the machine, but not the network."""

    def __init__(self, lab: int, number: int) -> None:
        self.name = _namespace(lab, f"h{number}")  # of its network namespace
        self.address = f"10.77.{lab}.{number}"
        self._switch = _namespace(lab, "switch")
        self._port = f"port{number}"
        # Constant, as a network card's address is: the other hosts remember it.
        self._card = f"02:77:00:00:{lab:02x}:{number:02x}"
        self._folder = _folder(lab)
        self._log = self._folder / f"{self.name}.log"
        self._sshd: subprocess.Popen[bytes] | None = None

    def command(self, command: Sequence[str]) -> list[str]:
        return [program("ip"), "netns", "exec", self.name, *command]

    def run(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        pipe, environ = subprocess.PIPE, {**os.environ, **(environ or {})}
        words = self.command(command)
        return subprocess.Popen(words, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def processes(self) -> list[int]:
        """Return the ids of the running processes on the host, its ssh server included."""
        return _inhabitants(self.name)

    def cut_off(self) -> None:
        """Unplug the host's cable at the switch: no connection is closed, but nothing gets through."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def join(self) -> None:
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def power_off(self) -> None:
        """End all processes and connections of the host at once, without a word to the others."""
        _ip("-n", self._switch, "link", "delete", self._port)  # first, or dying processes close connections
        _remove_namespace(self.name)
        self.reap()

    def power_on(self) -> None:
        """Start the network and the ssh server of the host, which answers when this returns."""
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "set", "lo", "up")
        peer = ["peer", "name", INTERFACE, "address", self._card, "netns", self.name]
        _ip("-n", self._switch, "link", "add", self._port, "type", "veth", *peer)
        _ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", INTERFACE)
        _ip("-n", self.name, "link", "set", INTERFACE, "up")
        self._start_sshd()

    def reap(self) -> None:
        if self._sshd is not None:
            self._sshd.wait(_PATIENCE)

    def install(self, others: Sequence[Host]) -> None:
        files = _NETNS_FILES / self.name
        files.mkdir(parents=True)
        local = f"127.0.0.1 localhost\n{self.address} {os.uname().nodename} {self.name}\n"
        (files / "hosts").write_text(local + "".join(f"{each.address} {each.name}\n" for each in others))
        # The home of root here: ssh ignores $HOME, and would use the machine's ~/.ssh.
        users = [f"root:x:0:0:root:{self._folder / 'home'}:/bin/sh"]
        users += [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != "0"]
        (files / "passwd").write_text("\n".join([*users, ""]))
        (files / "shadow").write_text("root:*:::::::\n")  # sshd refuses a root that is locked with a "!"
        (files / "shadow").chmod(0o600)
        key = self._folder / f"{self.name}.key"
        _make_key(key)
        (self._folder / f"{self.name}.conf").write_text(
            f"ListenAddress {self.address}\nPort 22\nHostKey {key}\n"
            f"AuthorizedKeysFile {self._folder / 'key.pub'}\n"
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
        deadline = time.monotonic() + _PATIENCE
        while "Server listening" not in self._log.read_text():
            if self._sshd.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"sshd of {self.name}", f"it does not start; it says\n{self._log.read_text()}")
            time.sleep(0.01)


def _make_key(path: Path) -> None:
    keygen = [program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", os.fspath(path)]
    subprocess.run(keygen, check=True)


# -- names and removal -----------------------------------------------------------------------------


def traces(number: int) -> list[Path]:
    """Return the names of a lab's namespaces, its files and its folder, as far as they exist."""
    named = [path for folder in (_NAMESPACES, _NETNS_FILES) for path in folder.glob(_namespace(number, "*"))]
    return [*named, *(path for path in [_folder(number)] if path.exists())]


def _namespace(number: int, part: str) -> str:
    return f"hvdlab-{number}-{part}"


def _folder(number: int) -> Path:
    return Path(f"/run/hvdlab-{number}")


def _claim_a_number() -> int:
    """Make the folder of a number that no other lab has, and return the number."""
    for number in random.sample(_NUMBERS, len(_NUMBERS)):  # avoids one that was in use a moment ago
        with contextlib.suppress(FileExistsError):
            _folder(number).mkdir(mode=0o700)
            return number
    raise LabError("the lab", f"{len(_NUMBERS)} labs are in use on this machine; end one of them")


def _remove(number: int) -> None:
    for path in traces(number):
        if path.parent == _NAMESPACES:
            _remove_namespace(path.name)  # with its processes and interfaces
        else:
            shutil.rmtree(path)


def _remove_namespace(name: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while living := _inhabitants(name):
        if time.monotonic() > deadline:
            raise LabError(f"processes {living}", "they do not end, though killed; dmesg may tell why")
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    _ip("netns", "delete", name)


def _inhabitants(name: str) -> list[int]:
    found = subprocess.run([program("ip"), "netns", "pids", name], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]  # none if the namespace is gone


if __name__ == "__main__":
    sys.stdin.buffer.read()
    _remove(int(sys.argv[1]))
