"""Scripts on PATH replace Slurm's programs; they print recorded output of the real ones."""

import os
import shutil
from pathlib import Path

import pytest

from hvdrecover.discovery import slurm
from hvdrecover.discovery.sources import Host
from hvdrecover.errors import DiscoveryError

RECORDED = Path(__file__).parent / "slurm"
SQUEUE = """#!/bin/sh
if [ "$*" != "--noheader --jobs $SLURM_JOB_ID --format %A|%i|%T|%N" ]; then
    echo "squeue: invalid: $*" >&2
    exit 1
fi
exec cat "$RECORDED/squeue"
"""
SCONTROL = """#!/bin/sh
echo "$*" >> "$RECORDED/asked"
case "$*" in
    "show node --oneliner "*) exec cat "$RECORDED/nodes";;
    "show job --details --oneliner $SLURM_JOB_ID") exec cat "$RECORDED/job";;
esac
echo "scontrol: invalid: $*" >&2
exit 1
"""
TASKS = {"SLURM_JOB_NODELIST": "node[1-3,5]", "SLURM_TASKS_PER_NODE": "3,2,1(x2)"}


def line(nodes, resources):
    return f"JobId=1 JobName=train NodeList=x   Nodes={nodes} CPU_IDs=0-3 Mem=0 GRES={resources}"


@pytest.fixture
def cluster(tmp_path):
    """Starts a cluster in a recorded situation; returns a function that discovers in it."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def write(name, script):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)

    def discover(situation="tasks", job="1", timeout=30.0, scontrol=SCONTROL, printed=None, **more):
        shutil.copytree(RECORDED / situation, tmp_path / "recorded", dirs_exist_ok=True)
        for name, text in (printed or {}).items():
            (tmp_path / "recorded" / name).write_text(text)
        write("squeue", SQUEUE)
        write("scontrol", scontrol)
        environ = {
            "PATH": f"{programs}:{os.defpath}",
            "RECORDED": str(tmp_path / "recorded"),
            "SLURM_JOB_ID": job,
        }
        return slurm.slurm({**environ, **more}, timeout)

    return discover


def test_a_job_without_gpus_has_a_slot_for_each_task(cluster):
    assert cluster(**TASKS) == [Host("node1", 3), Host("node2", 2), Host("node3", 1), Host("node5", 1)]


@pytest.mark.parametrize(
    ("situation", "job", "nodes"),
    [
        ("het", "3", ["node1", "node5"]),  # all parts of a heterogeneous job
        ("array", "7", ["node1"]),
        ("shrunk", "1", ["node1", "node2"]),
    ],
)
def test_the_present_nodes_of_this_job_are_its_hosts(cluster, situation, job, nodes):
    assert [host.name for host in cluster(situation, job)] == nodes


def test_unhealthy_nodes_are_left_out_whatever_the_reason_given_for_them_says(cluster):
    assert cluster("sick", **TASKS) == [Host("node5", 1)]


def test_nodes_with_gpus_have_a_slot_for_each(cluster):
    job = (
        line("node[1-2]", "gpu:a100:4(IDX:0-3)")
        + "   Nodes=node[3,5] CPU_IDs=0-1 Mem=0 GRES=gpu:v100:2(IDX:0-1)\n"
    )
    slots = [host.slots for host in cluster(printed={"job": job}, **TASKS)]
    assert slots == [4, 4, 2, 2]


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ("gpu:a100:4(IDX:0-3)", 4),
        ("gpu:2(CNT:2)", 2),
        ("gpu:47gb:0(IDX:),gpu:24gb:1(IDX:5),gpu:a100:2(IDX:0-1)", 3),
        ("gpu:a100_1g.5gb:2(IDX:0,7)", 2),
        ("craynetwork:1,gpu:2", 2),
        ("mps:100(IDX:0),shard:3(0/8)", 0),
        ("", 0),
    ],
)
def test_gpus_are_counted_in_each_way_in_which_slurm_writes_them(resources, gpus):
    assert slurm.gpus_per_node(line("n1", resources), "1").get("n1", 0) == gpus


def test_a_job_that_does_not_run_has_no_hosts(cluster):
    with pytest.raises(DiscoveryError, match=r"^Slurm job 1: .* COMPLETING$"):
        cluster(printed={"squeue": "1|1|COMPLETING|node[1-2]\n"})


def test_a_controller_that_hangs(cluster):
    with pytest.raises(DiscoveryError, match=r"^scontrol: .* [12][.\d]* s$"):
        cluster(scontrol="#!/bin/sh\nsleep 600\n", timeout=2.0)


def test_outside_of_a_job():
    with pytest.raises(DiscoveryError, match=r"^SLURM_JOB_ID: .* sbatch"):
        slurm.slurm({}, 1.0)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("node1", ["node1"]),
        ("node[1-2,05]", ["node1", "node2", "node05"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a[1-2],b,c[3]-ib", ["a1", "a2", "b", "c3-ib"]),
        ("rack[1-2]n[09-10]", ["rack1n09", "rack1n10", "rack2n09", "rack2n10"]),
        ("", []),
    ],
)
def test_lists_of_nodes(nodes, names):
    assert slurm.expanded(nodes) == names
