"""A Slurm cluster of the lab's hosts: a controller on the first, and a node on each."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.lab import Host, Lab, find, program

PACKAGES = ("slurm-wlm", "munge")
PATIENCE = 200.0  # seconds to wait for anything
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

# A requeued job waits as long as a credential lives, which is 5 s at least. "urgent" preempts "normal".
_SETTINGS = """\
ClusterName=lab
SlurmctldHost={machine}({controller})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=1
SlurmdTimeout=30
MessageTimeout=30
UnkillableStepTimeout=150
BatchStartTimeout=60
KillWait=30
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def lacks() -> str:
    """Return why there can be no cluster here, with the remedy; empty if there can."""
    if all(map(find, _PROGRAMS)):
        return ""
    return f"Slurm is not here; apt-get install {' '.join(PACKAGES)}"


class Slurm:
    """A cluster. Its files are in the lab's folder, and its processes on the lab's hosts: they go with it."""

    def __init__(self, lab: Lab, options: str = "") -> None:
        self._lab = lab
        self._folder = lab.folder / "slurm"
        for name in ("state", *(host.name for host in lab.hosts)):
            (self._folder / name).mkdir(parents=True)
        self.environ = {"SLURM_CONF": os.fspath(self._folder / "slurm.conf")}
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=2" for host in lab.hosts)
        settings = _SETTINGS.format(
            machine=os.uname().nodename, controller=lab.hosts[0].address, folder=self._folder, nodes=nodes
        )
        (self._folder / "slurm.conf").write_text(settings + options)
        # Its other value looks for cgroups, which hosts of a lab don't see; nothing here uses any.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._let_hosts_log_in()
        self._start()

    def close(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait(PATIENCE)

    def daemons(self) -> list[int]:
        """The processes of the lab's hosts that are there without a job: their ssh servers are, too."""
        return self._idle

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Return what one of Slurm's programs prints on the first host."""
        done = subprocess.run(
            self._lab.hosts[0].command([program(command[0]), *command[1:]]),
            env={**os.environ, **(environ or {}), **self.environ},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.log()}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """Return what ``scontrol show job`` says of a job, or of one task of an array."""
        line = self.run("scontrol", "show", "job", "--oneliner", job)
        return dict(word.partition("=")[::2] for word in line.split() if "=" in word)

    def set_node(self, host: Host, state: str) -> None:
        """Set the state of a host, as an administrator does."""
        self.run("scontrol", "update", f"NodeName={host.name}", f"State={state}", "Reason=test")

    def forbid_ssh(self) -> None:
        """Take the key away by which hosts log in to each other."""
        (self._home / ".ssh" / "id_ed25519").unlink()

    def log(self) -> str:
        """The ends of what Slurm's daemons have written."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in self._folder.glob("*.log")
        )

    def _let_hosts_log_in(self) -> None:
        """Have ssh find the key by itself, as it does for users of a cluster."""
        shutil.copyfile(self._lab.key, self._home / ".ssh" / "id_ed25519")
        (self._home / ".ssh" / "id_ed25519").chmod(0o600)

    @property
    def _home(self) -> Path:
        return self._lab.folder / "home"

    def _start(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        first = self._lab.hosts[0]
        words = [f"--socket={self._folder}/munge.socket", f"--key-file={key}"]
        words += [f"--{name}-file={self._folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self._daemon(first, "munged", "--foreground", "--force", *words)
        self._until((self._folder / "munge.socket").exists)
        self._daemon(first, "slurmctld", "-D")
        for host in self._lab.hosts:
            self._daemon(host, "slurmd", "-D", "-N", host.name)
        self._until(self._is_up)
        self._idle = [process for host in self._lab.hosts for process in host.processes()]

    def _daemon(self, host: Host, name: str, *options: str) -> None:
        self._daemons.append(
            subprocess.Popen(
                host.command([program(name), *options]),
                env={**os.environ, **self.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def _is_up(self) -> bool:
        words = [program("sinfo"), "--noheader", "--Node", "--format", "%t", "--partition", "normal"]
        asked = subprocess.run(
            self._lab.hosts[0].command(words),
            env={**os.environ, **self.environ},
            capture_output=True,
            text=True,
        )
        return asked.stdout.split() == ["idle"] * len(self._lab.hosts)

    def _until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)
