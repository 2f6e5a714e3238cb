"""The harness for jobs with faults: the drill, the benchmarks and the integration tests use it.

- `run` starts a job, waits for it and ends it.
- `faults` lists the faults and does them to a job; `schedule` plans them.
- `witness` runs inside each training process and records commits, steps and batches.
- `records` reads the lines of the witnesses; `check` compares two runs by them.
- `drill` runs a script undisturbed, then with faults; `verdict` reports the result.
- `lab` makes several hosts on this machine; `storage` is a file system that fails on demand.
"""
