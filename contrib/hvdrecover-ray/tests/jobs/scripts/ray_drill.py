"""Runs `hvdrecover drill` in slots of Ray. The arguments are options of the drill, ``--`` and the script."""

from __future__ import annotations

import subprocess
import sys

import ray

import hvdrecover_ray

ray.init(log_to_driver=False)
with hvdrecover_ray.slots(2, timeout=120) as held:
    command = [sys.executable, "-m", "hvdrecover", "drill", "-np", "2", *held.options, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=held.environ).returncode)
