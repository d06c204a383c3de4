"""``python -m gckernels``: the command ``gckernels``.

The command speaks of both halves of the package, so it lives in ``gckernels.sync``. This module is not a part of the
library, which never imports ``gckernels.sync``: nothing imports it, Python runs it.
"""

import sys

from gckernels.planner.commands import main

if __name__ == "__main__":
    sys.exit(main())
