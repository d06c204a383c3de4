"""``python -m gckernels``: the command ``gckernels``.

The command speaks of all parts of the package, so it lives in the highest one, ``gckernels.planner``. This module is
not a part of the library, which imports neither that nor ``gckernels.sync``: nothing imports it, Python runs it.
"""

import sys

from gckernels.planner.commands import main

if __name__ == "__main__":
    sys.exit(main())
