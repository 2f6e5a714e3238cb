"""Removes a lab as soon as the process that uses it is done with it, or gone.

``python -m hvdrecover.drill.lab.janitor NUMBER`` waits for the end of its standard input, a pipe whose other
end only that process holds. It inherits the claim to the lab's number too: nobody takes it before all is
gone.
"""

from __future__ import annotations

import sys

from hvdrecover.drill.lab.network import remove

if __name__ == "__main__":
    sys.stdin.buffer.read()
    remove(int(sys.argv[1]))
