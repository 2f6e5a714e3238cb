"""Print the transcript of a seed, or run many: ``python -m tests.simulation SEED`` or ``--seeds N``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter

from tests.simulation.simulate import Outcome, run_seed

_AT_ONCE = 50  # seeds in a row of one process, which keeps its undisturbed runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/simulate", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="print the transcript of this seed")
    parser.add_argument("--seeds", type=int, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one for each core")
    options = parser.parse_args()
    if options.seeds is None:
        outcome = run_seed(options.seed or 0)
        print(outcome.report())
        return outcome.failure is not None
    return _many(options.first, options.seeds, options.processes)


def _many(first: int, count: int, processes: int) -> int:
    started = time.monotonic()
    faults: Counter[str] = Counter()
    states: set[int] = set()
    orders: set[int] = set()
    events = failed = 0
    with multiprocessing.Pool(processes) as pool:
        for number, outcome in enumerate(pool.imap(_run, range(first, first + count), _AT_ONCE), 1):
            if outcome.failure is not None:
                failed += 1
                print(f"\n{outcome.report()}\n", flush=True)
            events += outcome.events
            states |= outcome.states
            orders.add(outcome.order)
            faults.update(outcome.faults)
            if number % 1000 == 0:
                print(f"{number} seeds, {time.monotonic() - started:.0f} s", flush=True)
    kinds = ", ".join(f"{kind} {times}" for kind, times in faults.most_common())
    print(f"{count} seeds from {first} on, {failed} with a finding, {time.monotonic() - started:.0f} s")
    print(f"{events} events; {len(states)} distinct states; {len(orders)} distinct interleavings")
    print(f"{sum(faults.values())} faults: {kinds}")
    return failed > 0


def _run(seed: int) -> Outcome:
    outcome = run_seed(seed)
    if outcome.failure is None:
        outcome.transcript.clear()
    return outcome


if __name__ == "__main__":
    sys.exit(main())
