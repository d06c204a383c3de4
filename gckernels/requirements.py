"""An import of this module raises ImportError where the package cannot run, and says what is missing."""

from __future__ import annotations

import sys

TRITON = "triton>=3.6,<4"

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"gckernels runs on Linux (WSL 2 included), not on {sys.platform}: its kernels need Triton, and its CPU path "
        "is built and loaded as on Linux"
    )

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"gckernels needs Triton, on machines without a GPU too, and cannot import it ({error}): pip install '{TRITON}'"
    ) from error
