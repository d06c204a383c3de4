"""Print, as JSON, the rows of ``harness/machine_code/pipes.py`` for the configurations that are named as arguments.

This is a script, because it needs a process without ``TRITON_INTERPRET``; ``test_pipes.py`` runs it.
"""

from __future__ import annotations

import json
import sys

from harness.machine_code.pipes import table

if __name__ == "__main__":
    json.dump(table(sys.argv[1:]), sys.stdout)
