"""The recording of plain steps in a tuned training. Every ``yield`` is a training step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from gckernels.compressor import Compressor

from ..communication.agreement import Failure, together
from ..frontends.abilities import Traceable
from ..traces.model_trace import ModelTrace
from ..tracing.model_tracer import ModelTracer
from .trials.rules import RECORDED, WARMUP
from .trials.training import Steps, TunedTraining

LONGEST = 12
"""Steps after which a recording is given up, such as that of a model whose hooks a compiler has left out."""


class StepRecording:
    """Records plain steps of a training. Every rank makes one.

    Args:
        traceable: lets its steps be recorded.
        model: a reference to the model that was given, which is not kept.
    """

    def __init__(self, training: TunedTraining, traceable: Traceable, model: weakref.ref[torch.nn.Module]) -> None:
        self._training, self._traceable, self._model = training, traceable, model
        self._frontend = training.frontend
        self._recorder: ModelTracer | None = None

    def close(self) -> None:
        """End a recording that is in progress."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            self._traceable.launch_late(None)

    def trace(self, methods: Sequence[Compressor]) -> Steps[ModelTrace | Failure]:
        """A trace of the next steps, which must be plain ones, with the errors of some compressors."""
        frontend = self._frontend
        recorder = together(frontend.group, frontend.device, self._new_recorder)
        if isinstance(recorder, Failure):
            self.close()
            return recorder
        self._traceable.launch_late(recorder.before_averaging)  # on all ranks or on none
        is_done = False
        for _ in range(LONGEST):
            yield
            if is_done := recorder.end_step():
                break
        self.close()
        if not is_done:
            return Failure(f"the model's steps could not be recorded in {LONGEST} of them")
        errors = together(frontend.group, frontend.device, lambda: recorder.errors(methods))
        if isinstance(errors, Failure):
            return errors
        trace = recorder.trace(errors, methods)
        return Failure("the model is gone") if trace is None else trace

    def _new_recorder(self) -> ModelTracer:
        model, frontend = self._model(), self._frontend
        if model is None:
            raise RuntimeError("the model is gone")
        self._training.checked(self._training.plan)  # a hook of somebody else may have come
        parameters, (group, device) = frontend.sent_parameters(), (frontend.group, frontend.device)
        groups = self._traceable.groups_to_trace
        self._recorder = ModelTracer(model, parameters, group, device, RECORDED, WARMUP, groups=groups)
        return self._recorder
