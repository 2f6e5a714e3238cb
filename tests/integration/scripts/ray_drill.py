"""`hvdrecover drill` in slots that Ray gives: arguments are its options, and after ``--`` the script."""

from __future__ import annotations

import subprocess
import sys

import ray

import hvdrecover.ray

ray.init(log_to_driver=False)
with hvdrecover.ray.slots(2, timeout=120) as held:
    command = [sys.executable, "-m", "hvdrecover", "drill", "-np", "2", *held.options, *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=held.environ).returncode)
