"""The harness for jobs with faults: the drill, the demo, the benchmarks and the integration tests use it.

- `jobs` starts a job, waits for it and ends it.
- `faults` lists the faults and does them to a job.
- `witness` runs inside each training process and records commits, steps and batches.
- `records` reads what the witnesses wrote; `check` compares two runs by it.
- `drill` runs a script undisturbed, then with faults; `verdict` says what came out.
- `lab` makes several hosts on this machine; `storage` is a file system that fails on demand.
"""
