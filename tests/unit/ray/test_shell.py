from __future__ import annotations

import pytest

from hvdrecover.ray.shell import Call, adapted, chosen, parse, script


@pytest.mark.parametrize(
    "words",
    [
        ["n1", "echo 'a b'"],
        ["-o", "BatchMode=yes", "-i", "key", "n1", "echo 'a b'"],
        # as Horovod calls it: options also after the host
        ["-o", "PasswordAuthentication=no", "n1", "-p", "22", "-oConnectTimeout=5", "echo 'a b'"],
        ["n1", "echo", "'a b'"],
    ],
)
def test_arguments_of_ssh(words: list[str]) -> None:
    assert parse(words) == Call("n1", "echo 'a b'")


def test_the_seat_is_that_of_the_local_rank() -> None:
    seats = {"n1": ["first", "second"]}
    assert chosen(seats, Call("n1", "cd /; env HOROVOD_LOCAL_RANK=1 python")) == "second"
    assert chosen(seats, Call("n1", "nvidia-smi")) == "first"
    assert chosen(seats, Call("n1", "env HOROVOD_LOCAL_RANK=2 python")) is None
    assert chosen(seats, Call("n2", "nvidia-smi")) is None


def test_a_command_uses_the_interface_that_the_host_has() -> None:
    command = "env HOROVOD_GLOO_IFACE=eth0 NCCL_SOCKET_IFNAME=eth0,eth1 python --iface=eth0"
    assert (
        adapted(command, "ens5") == "env HOROVOD_GLOO_IFACE=ens5 NCCL_SOCKET_IFNAME=ens5 python --iface=eth0"
    )


def test_without_devices_none_are_named() -> None:
    environ = {"WORD": "x", "PATH": "/bin"}
    assert script("true", environ, []).splitlines()[:-1] == ["export PATH=/bin", "export WORD=x"]
    assert script("true", environ, ["0", "3"]).splitlines()[0] == "export CUDA_VISIBLE_DEVICES=0,3"


def test_scripts_find_the_real_ssh() -> None:
    environ = {"HVDRECOVER_EVENTS": "/runs/1", "PATH": "/runs/1/bin:/usr/bin:/bin"}
    assert "export PATH=/usr/bin:/bin" in script("true", environ, []).splitlines()
