"""The judgement of whether hosts have memory for the arenas that commits are copied into."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrecover.doctor.findings import Finding, failure, ok, warning
from hvdrecover.host_memory import Available

ARENAS = 2  # of a state's size on each rank, at most: one that is kept, one while that is being written
_MEMORY = "host memory"


def judge(free: Mapping[str, Available], slots: Mapping[str, int], state: int | None) -> Finding:
    """Return whether the hosts have memory for the arenas.

    Args:
        free: host to what it has left.
        slots: host to its number of ranks.
        state: size of the training state in bytes, or None if the user has not said.
    """
    facts = {
        host: {"bytes_available": each.nbytes, "limited_by_cgroup": each.limited, "ranks": slots[host]}
        for host, each in free.items()
    }
    if state is None:
        rooms = ", ".join(
            f"{_gigabytes(each.nbytes // (ARENAS * slots[host]))} on {host}" for host, each in free.items()
        )
        rule = (
            f"commits take up to {ARENAS} times the state's size on each rank, so there is room for states of"
        )
        return ok(_MEMORY, f"{rule} {rooms}", hosts=facts, state_bytes=None)
    tight = {host: each for host, each in free.items() if each.nbytes < ARENAS * state * slots[host]}
    if not tight:
        what = f"{ARENAS} times {_gigabytes(state)} for each rank fit on every host"
        return ok(_MEMORY, what, hosts=facts, state_bytes=state)
    what = "; ".join(
        f"{host} has {_gigabytes(each.nbytes)} left{' in its cgroup' if each.limited else ''}, and commits "
        f"of {_gigabytes(state)} on {slots[host]} ranks take up to {_gigabytes(ARENAS * state * slots[host])}"
        for host, each in tight.items()
    )
    remedy = "Free memory there, raise the cgroup's limit, or use fewer slots or larger hosts."
    if small := [host for host, each in tight.items() if each.nbytes < state * slots[host]]:
        return failure(_MEMORY, what, remedy, at_fault=small, hosts=facts, state_bytes=state)
    return warning(_MEMORY, what, remedy, hosts=facts, state_bytes=state)


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB"
