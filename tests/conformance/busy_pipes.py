"""Print, as JSON, the rows of ``gckernels/testing/pipes.py`` for the configurations that are named as arguments.

This is a script, because it needs a process without ``TRITON_INTERPRET``; ``test_pipes.py`` runs it.
"""

from __future__ import annotations

import json
import sys

from gckernels.testing.pipes import table

if __name__ == "__main__":
    json.dump(table(sys.argv[1:]), sys.stdout)
