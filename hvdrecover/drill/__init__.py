"""The harness for jobs with faults: the drill, the benchmarks and the integration tests use it.

- `run` starts a job, waits for it and ends it.
- `faults` lists the faults and does them to a job. `lab` makes several hosts on this machine.
- `witness` records commits, steps and batches inside each training process, and has it fail on demand.
- `check` compares two runs. `drill` plans faults, runs a script undisturbed and with them, and reports.
"""
