"""A job on pods: containers with an ssh server as their first process, listed by an API server over HTTP."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig, pod
from tests.integration.conftest import LONG, Start
from tests.support.commands import wait_until
from tests.support.faulty_run import assert_no_step_is_lost
from tests.support.jobs import PATIENCE
from tests.support.lab import Host, JobInLab, Lab, program

LEAVE_HOST = Path(__file__).parents[2] / "deploy" / "kubernetes" / "leave-host"
_NETWORK = 0x40000000  # CLONE_NEWNET

pytestmark = pytest.mark.acceptance


class Pod:
    """A host of the lab as a pod: a container of its own process table, which ends with its first process."""

    def __init__(self, host: Host, api: KubernetesApi) -> None:
        self._host, self._api = host, api
        assert host._sshd is not None
        host._sshd.kill()
        host.reap()
        self.name = host.name
        self.start()

    def start(self) -> None:
        space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        sshd = [program("sshd"), "-D", "-e", "-f", os.fspath(self._host._folder / f"{self.name}.conf")]
        self._container = subprocess.Popen(
            self._host.command([*space, *sshd]), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._container.stderr is not None
        while "Server listening" not in (line := self._container.stderr.readline()):
            assert line, "its ssh server has not started"
        self.list()

    def list(self, **changes: str) -> None:
        """List it as ready, with changes."""
        self._api.add(pod(self.name, ip=self._host.address, **changes))

    def delete(self) -> None:
        """Delete it as Kubernetes does, with all the time that it needs."""
        self.list(deleted="2026-01-02T00:00:00Z")
        (first,) = self._first()
        inside = ["nsenter", "--target", str(first), "--pid", "--mount"]
        subprocess.run([*inside, LEAVE_HOST], check=True, timeout=PATIENCE)  # preStop
        os.kill(first, signal.SIGTERM)
        self._container.wait(PATIENCE)
        del self._api.pods["default"][self.name]

    def processes(self) -> int:
        """The number of processes in it, its ssh server included."""
        return len(self._host.processes()) - 1  # not the one that waits for its first process

    def _first(self) -> list[int]:
        children = Path(f"/proc/{self._container.pid}/task/{self._container.pid}/children")
        return [int(process) for process in children.read_text().split()]


@contextmanager
def serving_in(host: Host, api: KubernetesApi) -> Iterator[None]:
    """Serve on the loopback of a host."""

    def enter() -> None:
        with (Path("/run/netns") / host.name).open() as space:
            assert ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _NETWORK) == 0

    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        thread.submit(enter).result()  # a socket belongs to the network of the thread that makes it
        thread.submit(stack.enter_context, api.running()).result()
        yield


@LONG
def test_a_pod_leaves_before_it_is_killed(lab: Lab, start: Start, tmp_path: Path) -> None:
    api = KubernetesApi()
    with serving_in(lab.hosts[0], api):
        pods = [Pod(host, api) for host in lab.hosts[1:]]
        api.add(pod(lab.hosts[0].name, ip=lab.hosts[0].address))
        environ = kubeconfig(tmp_path / "config", api.url)
        job = JobInLab(lab, tmp_path, "torch", start, "kubernetes --selector app=train", environ)
        job.wait_for(3)

        # Deleted: no step is lost, and nothing of the job is left when its first process is stopped.
        after = job.generation()
        pods[1].delete()
        job.wait_for(2, after)
        assert_no_step_is_lost(job.run)

        # Another one in its place.
        after = job.generation()
        pods[1].start()
        job.wait_for(3, after)

        # About to be evicted, with no word to the pod yet; and then nobody is evicted after all.
        after = job.generation()
        pods[0].list(disrupted="True")
        job.wait_for(2, after)
        wait_until(lambda: pods[0].processes() == 1)
        assert_no_step_is_lost(job.run)
        after = job.generation()
        pods[0].list(disrupted="False")
        job.wait_for(3, after)
        job.assert_each_sample_once()
