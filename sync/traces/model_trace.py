"""Traces of models: which gradients a training step has, how large they are, and when backward has computed them."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..plans.json_files import MAX_NBYTES, Entry, bytes_of, parsed, shown, write_whole
from ..plans.json_records import checked_fields, written
from .traced_tensors import Float, TracedGather, TracedTensor, TraceError

_REMEDY = "write the trace again, with 'gckernels trace SCRIPT -o FILE'"


@dataclass(frozen=True)
class ModelTrace:
    """A training step without compression and without the time of communication. All times are in seconds.

    Attributes:
        model: the name of the model.
        tensors: the gradients, in the order in which they are ready.
        backward_s: from the start of backward until the last gradient is ready.
        forward_s: everything before backward; 0 if the trace does not say. The optimizer is in it where a trace does
            not tell them apart.
        optimizer_s: everything after the gradients are averaged; 0 if the trace does not say.
        buckets: DDP's buckets, or FSDP's groups of parameters, as names of tensors in the order of their memory, first
            launched first; empty for a bare module.
        source: where the numbers come from, for people.
        copies_gradients: whether DDP copies averaged gradients out of its buckets, as it does without
            ``gradient_as_bucket_view``.
        gathers: the gathers of parameters, in the order in which they are asked for; empty if the trace is not of a
            model of FSDP2.
    """

    model: str
    tensors: tuple[TracedTensor, ...]
    backward_s: Float
    forward_s: Float = 0.0
    optimizer_s: Float = 0.0
    buckets: tuple[tuple[str, ...], ...] = ()
    source: str = ""
    copies_gradients: bool = False
    gathers: tuple[TracedGather, ...] = ()

    @functools.cached_property
    def by_name(self) -> Mapping[str, TracedTensor]:
        """The gradients by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def numel(self) -> int:
        """The number of elements of all gradients."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_whole_step(self) -> bool:
        """Whether it has more of a step than backward. Otherwise steps that are predicted from it are backward and
        synchronisation alone, and all gains look larger than those of a training."""
        return self.forward_s > 0

    @property
    def computing_s(self) -> float:
        """The seconds of forward, backward and the optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s

    def of_shards(self, ranks: int) -> ModelTrace:
        """The trace of the shards that one of ``ranks`` ranks has, with the largest share of each tensor's rows."""
        whole = (each.shape or (each.numel,) for each in self.tensors)
        shapes = ((-(-rows // ranks), *others) for rows, *others in whole)
        pairs = zip(self.tensors, shapes, strict=True)
        tensors = (replace(each, numel=math.prod(shape), shape=shape) for each, shape in pairs)
        gathers = (replace(each, frozen_numel=-(-each.frozen_numel // ranks)) for each in self.gathers)
        return replace(self, tensors=tuple(tensors), gathers=tuple(gathers))

    def remembering(self, found: Mapping[tuple[str, str], float]) -> ModelTrace:
        """The trace with the errors that compressors have had in training, where they are larger.

        Args:
            found: the errors by names of parameters and specs of compressors that are not fitted to a shape.
        """

        def remembers(tensor: TracedTensor) -> TracedTensor:
            mine = {spec: error for (name, spec), error in found.items() if name == tensor.name}
            larger = {spec: max(error, tensor.errors.get(spec, 0.0)) for spec, error in mine.items()}
            return replace(tensor, errors={**tensor.errors, **larger}) if larger else tensor

        return replace(self, tensors=tuple(map(remembers, self.tensors)))

    def fingerprint(self) -> str:
        """The SHA-256 hash of the trace, in hexadecimal, as its file has it."""
        records = importlib.import_module(".trace_files", __package__)
        return str(records.hash_of(records.record_of(written(self))))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, as JSON, which :meth:`load` reads. The file is replaced as a whole, or not at all.

        Raises:
            TraceError: the trace is not valid, or the file cannot be written.
        """
        text = self.to_text()
        try:
            write_whole(path, text)
        except OSError as error:
            raise TraceError(
                f"{os.fspath(path)}: the trace cannot be written: {error.strerror}; give another path"
            ) from error

    @staticmethod
    def load(path_or_name: str | os.PathLike[str]) -> ModelTrace:
        """The trace in a file, or a shipped one.

        Args:
            path_or_name: the path of a file that :meth:`save` has written or that has the published form; a name of
                :func:`~gckernels.sync.traces.trace_files.trace_names`, unless there is a file of that name; or ``-``
                for the standard input.

        Raises:
            TraceError: there is no such file or name, or the trace is damaged, cut off, of another version, or not
                valid.
        """
        if not isinstance(path_or_name, str | os.PathLike):
            raise TraceError(f"ModelTrace.load: expected a path or a name, got {type(path_or_name).__name__}")
        path = os.fspath(path_or_name)
        if path == "-":
            return ModelTrace.from_text(sys.stdin.buffer.read(MAX_NBYTES + 1), "standard input")
        shipped = importlib.import_module(".trace_files", __package__).shipped_traces()
        if isinstance(path, str) and path in shipped and not os.path.exists(path):
            return ModelTrace.from_text(shipped[path].read_bytes(), path)
        try:
            return ModelTrace.from_text(bytes_of(path), os.fsdecode(path))
        except (OSError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            names = ", ".join(sorted(shipped)) or "none"
            reason = error.strerror if isinstance(error, OSError) else error
            give = f"give the path of a trace or the name of a shipped one ({names})"
            raise TraceError(f"{path!r}: no trace can be read: {reason}; {give}") from error

    def to_text(self) -> str:
        """The text of the trace's file.

        Raises:
            TraceError: the trace is not valid.
        """
        file, remedy = f"the trace of {shown(self.model)}", "make it of the types that ModelTrace says"
        fields = checked_fields(self, file, TraceError, remedy)
        records = importlib.import_module(".trace_files", __package__)
        records.check_fields(Entry(fields, file, TraceError, remedy), vars(self))
        return str(records.text_of(records.record_of(fields)))

    @staticmethod
    def from_text(text: str | bytes, file: str) -> ModelTrace:
        """The trace in the text of a file.

        Args:
            text: the text; bytes are UTF-8.
            file: the name of the file, for errors.

        Raises:
            TraceError: the trace is not valid.
        """
        document = parsed(text, file, "trace", TraceError, _REMEDY)
        files = importlib.import_module(".trace_files", __package__)
        return ModelTrace(**files.fields_of(document, ModelTrace))
