"""Hosts of a Slurm job: ``squeue`` says its present nodes, ``scontrol`` their states and the job's GPUs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from hvdrecover.discovery.sources import Host, output_of, source
from hvdrecover.errors import DiscoveryError

# Words and marks in the state of an unusable node, as in MIXED+DRAIN or DOWN*. A node that is to be rebooted
# (REBOOT_REQUESTED) is usable until its jobs have ended.
_UNUSABLE = re.compile(
    r"\b(DOWN|ERROR|DRAIN(ED|ING)?|FAIL(ING)?|FUTURE|INVALID_REG|MAINT(ENANCE)?|NOT_RESPONDING|POWER\w*"
    r"|REBOOT(_ISSUED)?)\b|[$*~!%#^]"
)

# A suspended job has its nodes still; one that is resized or signalled continues.
_GOES_ON = {"RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "SUSPENDED", "STOPPED"}

_PARTS = re.compile(r"(?:\[[^\]]*\]?|[^,\[])+")
_RANGES = re.compile(r"\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_NODE_STATE = re.compile(r"^NodeName=(\S+) .*? State=(\S+)", re.MULTILINE)
_NODES_GRES = re.compile(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)??:(\d+)(?=[(,]|$)")  # gpu:4 or gpu:a100:4(IDX:0-3)


# `every`: slurmctld answers the whole cluster. Variables: a requeued job keeps its id, but not its nodes.
@source(every=5.0, variables=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_RESTART_COUNT"))
def slurm(environ: Mapping[str, str], timeout: float) -> list[Host]:
    """The nodes of this Slurm job, with a slot for each of its GPUs, or for each task if it has no GPU."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        problem = "is not set, so this is not a Slurm job; start the driver by sbatch or in salloc"
        raise DiscoveryError("SLURM_JOB_ID", problem)
    end = time.monotonic() + timeout

    def output(*command: str) -> str:
        left = max(end - time.monotonic(), 0.0)
        return output_of(command, environ, left).decode(errors="replace")

    listed = output("squeue", "--noheader", "--jobs", job, "--format", "%A|%i|%T|%N")
    nodes = job_nodes(listed, job)
    reasons = unusable(output("scontrol", "show", "node", "--oneliner", ",".join(nodes)))
    usable = [node for node in nodes if node not in reasons]
    if not usable:
        why = "; ".join(f"{node} is {reasons[node]}" for node in nodes[:3])
        raise DiscoveryError(f"Slurm job {job}", f"none of its {len(nodes)} nodes can be used: {why}")
    gpus = gpus_per_node(output("scontrol", "show", "job", "--details", "--oneliner", job), job)
    if gpus:  # parts of a heterogeneous job that have none are not for training
        return [Host(node, gpus[node]) for node in usable if node in gpus]
    tasks = tasks_per_node(environ)
    return [Host(node, tasks.get(node)) for node in usable]


def job_nodes(listed: str, job: str) -> list[str]:
    """Return the nodes of a job, of all its parts if it is a heterogeneous one."""
    name = f"Slurm job {job}"
    nodes: dict[str, None] = {}
    states: list[str] = []
    for line in listed.splitlines():
        # id|shown id|state|nodes: a line for each part, and for each other task of the job's array
        fields = line.strip().split("|")
        if len(fields) != 4 or (fields[0] != job and not fields[1].startswith(f"{job}+")):
            continue
        states.append(fields[2])
        if fields[2] in _GOES_ON:
            nodes.update(dict.fromkeys(expanded(fields[3])))
    if not states:
        raise DiscoveryError(name, "has ended; squeue does not list it")
    if not nodes:
        raise DiscoveryError(name, f"has no nodes: it is {', '.join(dict.fromkeys(states))}")
    return list(nodes)


def expanded(nodes: str) -> list[str]:
    """The names in a list of nodes: ``gpu[01-03,07],login1`` names five."""
    return [name for part in _PARTS.findall(nodes) for name in _expanded_part(part)]


def _expanded_part(part: str) -> Iterator[str]:
    match = _RANGES.search(part)
    if match is None:
        yield part
        return
    before, after = part[: match.start()], part[match.end() :]
    for span in match[1].split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for rest in _expanded_part(after):  # there may be several, as in rack[1-2]node[1-4]
                yield f"{before}{number:0{len(first)}}{rest}"


def unusable(shown: str) -> dict[str, str]:
    """Return the unusable nodes of ``scontrol show node --oneliner``, each with its state."""
    return {name: state for name, state in _NODE_STATE.findall(shown) if _UNUSABLE.search(state)}


def gpus_per_node(shown: str, job: str) -> dict[str, int]:
    # There is a line for each part of a heterogeneous job, or for each task of an array of jobs.
    of_job = re.compile(rf"JobId={job} |JobId=\d+ HetJobId={job} ")
    return {
        node: count
        for line in filter(of_job.match, shown.splitlines())
        for nodes, resources in _NODES_GRES.findall(line)
        if (count := sum(map(int, _GPUS.findall(resources))))
        for node in expanded(nodes)
    }


def tasks_per_node(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the tasks on each node that the job was given when it started."""
    nodes = expanded(environ.get("SLURM_JOB_NODELIST", ""))
    given = _COUNT.findall(environ.get("SLURM_TASKS_PER_NODE", ""))  # 2(x3),1 is 2, 2, 2, 1
    counts = [int(count) for count, times in given for _ in range(int(times or 1))]
    # In a step on only some of the job's nodes, Slurm gives the tasks of the step, not of the job.
    return dict(zip(nodes, counts, strict=True)) if len(nodes) == len(counts) else {}
