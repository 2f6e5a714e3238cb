"""``python -m hvdrecover.doctor.matrix_products cpus|gpus``: matrix products on each processor of this host.

Two products are computed again and again. One is of whole numbers, with sums below 2**53, which float64
holds exactly in whatever order they are summed: its digest is the same on every machine that is well. The
other one rounds, in the precision that training computes in: its bits are the same on all processors of one
kind with the same library. Processors that get one of them wrong now and then do exist (P. H. Hochschild et
al., Cores that don't count, HotOS 2021); no error is raised then, and training goes wrong slowly.

All CPUs work at the same time, one process on each, as a job would have it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover import config
from hvdrecover.checkpoint.digest import digest
from hvdrecover.doctor import cpus
from hvdrecover.errors import LaunchError
from hvdrecover.launch import processes

# Of the product of whole numbers; a test computes it in integers.
WHOLE = "ff36318ef9c72f39003a509db56ec2fc"
_SECONDS = 1.0  # for each processor
_LEAST = 3  # products, however long they take
_WHOLE_SIZE = 256  # rows and columns: 256 * (2**22)**2 is 2**52
_CPU_SIZE = 512  # some milliseconds on one CPU: shorter than a slice of time, so that one fits in between
_GPU_SIZE = 4096
_LONGEST = 120.0  # seconds for all of it: importing torch takes long on a host that is busy
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS")

Matrix = npt.NDArray[Any]


@dataclass(frozen=True)
class Engine:
    """The means of a processor to multiply.

    Attributes:
        device: such as ``CPU 3``, or ``CPUs`` if it may be any.
        kind: of processor and library; those of one kind round alike.
        whole: returns the product of whole numbers.
        rounded: returns the other product, complete.
        fetched: returns that in host memory.
    """

    device: str
    kind: str
    whole: Callable[[], Matrix]
    rounded: Callable[[], Any]
    fetched: Callable[[Any], Matrix]


def whole_numbers(size: int = _WHOLE_SIZE) -> tuple[Matrix, Matrix]:
    """Return two matrices of whole numbers between -2**22 and 2**22: int64 of shape ``[size, size]``."""
    numbers = np.arange(2 * size * size, dtype=np.int64) * 2654435761 % 2**23 - 2**22  # Knuth's multiplier
    first, second = numbers.reshape(2, size, size)
    return first, second


def measure(engine: Engine, seconds: float = _SECONDS) -> dict[str, Any]:
    """Multiply for a while.

    Returns:
        ``device`` and ``kind``; ``products``, how many of each sort there were; ``wrong``, how many of whole
        numbers were not what they must be; ``bits``, the digests of the others and how often each came;
        ``seconds``, the shortest time of one; ``share`` of the time in which the process was running.
    """
    bits: Counter[str] = Counter()
    times: list[float] = []
    wrong = 0
    began, worked = time.perf_counter(), time.process_time()
    while len(times) < _LEAST or time.perf_counter() - began < seconds:
        wrong += digest(engine.whole()) != WHOLE
        start = time.perf_counter()
        product = engine.rounded()
        times.append(time.perf_counter() - start)
        bits[digest(engine.fetched(product))] += 1
    return {
        "device": engine.device,
        "kind": engine.kind,
        "products": len(times),
        "wrong": wrong,
        "bits": dict(bits),
        "seconds": min(times),
        "share": (time.process_time() - worked) / (time.perf_counter() - began),
    }


def cpu(number: int | None, kind: str) -> Engine:
    """Return the engine of a CPU; this process is bound to it from now on."""
    if number is not None:
        os.sched_setaffinity(0, {number})
    first, second = (matrix.astype(np.float64) for matrix in whole_numbers())
    left, right = (matrix.astype(np.float32) / 2**22 for matrix in whole_numbers(_CPU_SIZE))
    exact, product = np.empty_like(first), np.empty_like(left)

    def whole() -> Matrix:
        np.matmul(first, second, out=exact)
        return exact

    def rounded() -> Matrix:
        np.matmul(left, right, out=product)
        return product

    return Engine(_named(number), kind, whole, rounded, lambda matrix: matrix)


def on_torch(device: str, kind: str, torch: Any, where: str, size: int = _GPU_SIZE) -> Engine:
    """Return the engine of a device of torch, such as ``cuda:0``."""
    first, second = (torch.from_numpy(each).to(where, torch.float64) for each in whole_numbers())
    left, right = (
        (torch.from_numpy(each).to(where, torch.float32) / 2**22).to(torch.bfloat16)
        for each in whole_numbers(size)
    )

    def rounded() -> Any:
        product = left @ right
        if product.is_cuda:
            torch.cuda.synchronize(where)
        return product

    return Engine(
        device,
        kind,
        lambda: np.asarray((first @ second).cpu().numpy()),
        rounded,
        lambda product: np.asarray(product.float().cpu().numpy()),
    )


def _cpus() -> list[dict[str, Any]]:
    """All CPUs at the same time; one whose process dies is told of as well."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    kind = f"{cpus.kind()}, numpy {np.__version__}, {blas['name']} {blas['version']}"
    context = multiprocessing.get_context("fork")  # numpy is imported once; its library has no threads
    begun = []
    for number in cpus.to_use():
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_on_cpu, args=(there, number, kind), daemon=True)
        process.start()
        there.close()
        begun.append((_named(number), process, here))
    found = []
    for device, process, here in begun:
        try:
            found.append(here.recv())
        except EOFError:
            process.join()
            ended = processes.describe(process.exitcode or 0)
            found.append({"device": device, "kind": kind, "ended": ended})
    return found


def _named(number: int | None) -> str:
    return "CPUs" if number is None else f"CPU {number}"


def _on_cpu(answers: Connection, number: int | None, kind: str) -> None:
    processes.die_with_parent()
    answers.send(measure(cpu(number, kind)))


def _gpus() -> Iterator[dict[str, Any]]:
    """One GPU after the other, as far as torch sees them."""
    torch = importlib.import_module("torch")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for index in range(torch.cuda.device_count()):
        kind = f"{torch.cuda.get_device_name(index)}, torch {torch.__version__}"
        yield {**measure(on_torch(f"GPU {index}", kind, torch, f"cuda:{index}")), "share": None}


def run(which: str) -> list[dict[str, Any]]:
    """Have a process of its own multiply on all ``cpus`` or ``gpus`` of this host.

    Raises:
        LaunchError: it has failed.
    """
    command = [sys.executable, "-m", "hvdrecover.doctor.matrix_products", which]
    environ = {**config.environment(), **dict.fromkeys(_ONE_THREAD, "1")}
    pipe = subprocess.PIPE
    child = processes.start(command, environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    try:
        told, complaints = child.communicate(timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"products on {which}", f"not done in {_LONGEST:.0f} s") from None
    finally:
        child.kill_group()
        child.ends()
    if child.returncode:
        lines = complaints.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        raise LaunchError(f"products on {which}", last or processes.describe(child.returncode))
    found: list[dict[str, Any]] = json.loads(told)
    return found


def main() -> None:
    """Multiply, and write what was found as JSON."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST)
    sys.stdout.write(json.dumps(_cpus() if sys.argv[1] == "cpus" else list(_gpus())))


if __name__ == "__main__":
    main()
