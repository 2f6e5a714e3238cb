from __future__ import annotations

import pytest

from hvdrecover_ray.remote_shell import choose_slot, parse, script, use_interface


@pytest.mark.parametrize(
    "words",
    [
        ["n1", "echo 'a b'"],
        ["-o", "BatchMode=yes", "-i", "key", "n1", "echo 'a b'"],
        # Horovod has options after the host, too
        ["-o", "PasswordAuthentication=no", "n1", "-p", "22", "-oConnectTimeout=5", "echo 'a b'"],
        ["n1", "echo", "'a b'"],
    ],
)
def test_arguments_of_ssh(words: list[str]) -> None:
    assert parse(words) == ("n1", "echo 'a b'")


def test_a_command_runs_in_the_slot_of_its_local_rank() -> None:
    slots = [{"port": 1}, {"port": 2}]
    assert choose_slot(slots, "cd /; env HOROVOD_LOCAL_RANK=1 python") == {"port": 2}
    assert choose_slot(slots, "nvidia-smi") == {"port": 1}
    assert choose_slot(slots, "env HOROVOD_LOCAL_RANK=2 python") is None
    assert choose_slot([], "nvidia-smi") is None


def test_a_command_uses_the_interface_of_its_host() -> None:
    command = "env HOROVOD_GLOO_IFACE=eth0 NCCL_SOCKET_IFNAME=eth0,eth1 python --iface=eth0"
    assert (
        use_interface(command, "ens5")
        == "env HOROVOD_GLOO_IFACE=ens5 NCCL_SOCKET_IFNAME=ens5 python --iface=eth0"
    )


def test_gpus_are_set_only_where_there_are_some() -> None:
    environ = {"WORD": "x", "PATH": "/bin"}
    assert script("true", environ, []).splitlines()[:-1] == ["export PATH=/bin", "export WORD=x"]
    assert script("true", environ, ["0", "3"]).splitlines()[0] == "export CUDA_VISIBLE_DEVICES=0,3"


def test_scripts_find_the_real_ssh() -> None:
    environ = {"HVDRECOVER_EVENTS": "/runs/1", "PATH": "/runs/1/bin:/usr/bin:/bin"}
    assert "export PATH=/usr/bin:/bin" in script("true", environ, []).splitlines()
