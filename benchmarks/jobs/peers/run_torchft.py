"""The launcher of torchft's replicas: a lighthouse, and a ``torchrun`` of one process for each replica."""

from __future__ import annotations

import os
import subprocess
import sys

from torchft.coordination import LighthouseServer

# Milliseconds. By default others wait for 5 s until a replica that sends no heartbeat counts as lost.
_HEARTBEATS, _JOIN, _TICK = 1000, 1000, 20


def main(replicas: int, command: list[str]) -> int:
    """Start all replicas; the exit code of the first that ends, which is not to happen."""
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=_JOIN,
        quorum_tick_ms=_TICK,
        heartbeat_timeout_ms=_HEARTBEATS,
    )
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse.address()}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    for rank in range(replicas):
        subprocess.Popen([*torchrun, *command], env={**environ, "REPLICA_GROUP_ID": str(rank)})
    return os.waitstatus_to_exitcode(os.wait()[1])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
