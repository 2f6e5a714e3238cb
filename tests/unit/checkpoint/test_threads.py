"""Threads for transfers: what they return, raise and leave undone, and that they hold up no exit."""

import subprocess
import sys

HANGING = """
import threading
import numpy as np
from hvdrecover.checkpoint.storage.interface import transferred

begun = threading.Semaphore(0)

def hang(piece, at):
    begun.release()
    threading.Event().wait()

def run(pieces):
    for _ in pieces:
        pass

pieces = transferred(np.zeros(400, np.uint8), 100, 2, hang)
threading.Thread(target=run, args=(pieces,), daemon=True).start()
for _ in range(2):
    begun.acquire()
print("the program ends")
"""


def test_transfers_that_hang_do_not_keep_a_process_from_exiting():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("the program ends\n", "", 0)
