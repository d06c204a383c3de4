"""Requirements of the package: importing this module raises an ImportError that says what is missing."""

from __future__ import annotations

import sys

TRITON = "triton>=3.6,<4"

if not sys.platform.startswith("linux"):
    raise ImportError(
        f"gckernels runs on Linux (including WSL 2), not on {sys.platform}: its kernels need Triton, and its CPU path "
        "is compiled and loaded for Linux"
    )

try:
    import triton  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"gckernels needs Triton, even without a GPU, and cannot import it ({error}): pip install '{TRITON}'"
    ) from error
