"""Reasons why no gradient of a model may use a compressor, whatever its error is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ...accuracy.accuracy import allowed_compressors, fitted
from ...traces.model_trace import Trace


def why_unusable(method: Compressor, trace: Trace) -> str | None:
    """Why no gradient of a trace may use a method even if it is named; ``None`` if one may."""
    if method == Identity():
        return "it compresses nothing"
    if any(allowed_compressors(trace, [method]).values()):
        return None
    tensors = [tensor for tensor in trace.tensors if tensor.dtype in GRAD_DTYPES]
    if not tensors:
        return f"gradients are of {_names(tensor.dtype for tensor in trace.tensors)}, it takes {_names(GRAD_DTYPES)}"
    if any(fitted(method, tensor) for tensor in tensors):
        return "it is for matrices, and all gradients are vectors"
    if not isinstance(method, Codec) and all(tensor.shape is None for tensor in tensors):
        return "it needs the shapes of matrices, which the trace does not have"
    return "no gradient has a shape for it"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
