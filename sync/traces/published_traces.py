"""Traces in the form in which others have published them: names, sizes, and ready times in microseconds.

Such a trace has neither shapes nor roles nor errors. Roles are found from names and sizes. It may have the time of
everything in a step that is not backward, forward and optimizer together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..plans.json_files import Entry
from .trace_records import check_order
from .traced_tensors import Role, TracedTensor

FIELDS = ("model", "source", "order", "tensors")
_EMBEDDINGS = ("wte", "wpe")  # how GPT-2's names call its two embeddings


def is_published(document: Entry) -> bool:
    """Whether the document is a published list of tensors, and no trace of ours."""
    return isinstance(document.value, dict) and "format" not in document.value and "tensors" in document.value


def published_fields(document: Entry) -> dict[str, Any]:
    """The attributes of the trace in a published list of tensors. Keys that are not known here are allowed.

    Raises:
        TraceError: the document is not valid.
    """
    fields = document.fields(FIELDS, None)
    source, batch = fields["source"].text(), fields.get("batch_per_gpu")
    if batch is not None and batch.value is not None:
        source += f" Batch per GPU: {batch.text()}."
    tensors = []
    for entry in fields["tensors"].items():
        given = entry.fields(("name", "numel", "ready_us"), None)
        tensors.append(
            TracedTensor(given["name"].name(), given["numel"].integer(), round(given["ready_us"].number() * 1e-6, 12))
        )
    check_order(fields["tensors"], tensors)
    rest_s = fields["rest_us"].number() * 1e-6 if "rest_us" in fields else 0.0
    return {
        "model": fields["model"].text(),
        "tensors": with_roles_by_name(tensors),
        "backward_s": tensors[-1].ready_s,
        "forward_s": rest_s,
        "source": source,
    }


def with_roles_by_name(tensors: Sequence[TracedTensor]) -> tuple[TracedTensor, ...]:
    """The tensors with the roles that their names and sizes suggest.

    Vectors are biases, and weights with as many elements as the bias beside them, as norms have. Embeddings are called
    so. The output is the first weight in the order of backward, if nothing but its own bias comes before it: the last
    layer of a model with tied embeddings has no weight of its own.
    """
    sizes = {tensor.name: tensor.numel for tensor in tensors}
    found = []
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        words = tensor.name.lower().replace("_", ".").split(".")
        if last.startswith("bias") or sizes.get(f"{module}.bias") == tensor.numel or tensor.numel < 2:
            role = Role.VECTOR
        elif any(word.startswith("embed") or word in _EMBEDDINGS for word in words) or tensor.name == "encoder.weight":
            role = Role.EMBEDDING
        else:
            role = Role.WEIGHT
        found.append(replace(tensor, role=role))
    first = next((index for index, tensor in enumerate(found) if tensor.role is Role.WEIGHT), len(found))
    module = found[first].name.rpartition(".")[0] if first < len(found) else ""
    if first < len(found) and all(tensor.name.rpartition(".")[0] == module for tensor in found[:first]):
        found[first] = replace(found[first], role=Role.OUTPUT)
    return tuple(found)
