"""``python -m hvdrecover`` is the command ``hvdrecover``."""

import sys

from hvdrecover.cli import main

sys.exit(main())
