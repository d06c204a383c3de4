"""Traces of models: which gradients a training step has, how large they are, and when backward has computed them."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .traced_tensors import Float, TracedGather, TracedTensor


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
        from . import trace_files

        return str(trace_files.fingerprint(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, as JSON, which :meth:`load` reads. The file is replaced as a whole, or not at all.

        Raises:
            TraceError: the trace is not valid, or the file cannot be written.
        """
        from . import trace_files

        trace_files.save(self, path)

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
        from . import trace_files

        return ModelTrace(**trace_files.fields_at(path_or_name, ModelTrace))

    def to_text(self) -> str:
        """The text of the trace's file.

        Raises:
            TraceError: the trace is not valid.
        """
        from . import trace_files

        return str(trace_files.text_of(self))

    @staticmethod
    def from_text(text: str | bytes, file: str) -> ModelTrace:
        """The trace in the text of a file.

        Args:
            text: the text; bytes are UTF-8.
            file: the name of the file, for errors.

        Raises:
            TraceError: the trace is not valid.
        """
        from . import trace_files

        return ModelTrace(**trace_files.fields_in(text, file, ModelTrace))
