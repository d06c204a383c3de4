"""The settings with which a model averages updates in place of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from gckernels.compressor import Compressor

from ..frontends.request import UNCOMPRESSED, Request
from ..plans.plan import Plan
from ..tuning.auto import Auto

if TYPE_CHECKING:
    from ..frontends.updates.schedule import Every, Schedule
    from ..frontends.updates.updates_frontend import UpdatesFrontend
    from ..frontends.updates.updates_request import Outer, UpdatesRequest

AGGRESSIVE = ("EFSignSGD(block=1024, magnitude='projection')", "BlockQuant(bits=4)", "BlockQuant")
"""The compressors of updates that the rule ``"aggressive"`` stands for."""
_SAFE = Auto()
_DECAYING = 2
"""The number of steps of the longest rounds whose residuals decay by default."""


@dataclass(frozen=True, eq=False)
class Updates:
    """Average the updates of a model over the ranks, in place of its gradients::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        attachment = sync.attach(model, sync.Updates(optimizer, "EFSignSGD", every=2))

    Each rank steps its own optimizer on its own gradients, with its own moments. An update is the change of the
    parameters in a round, which has a number of steps. After each round the mean of the updates is added to the
    parameters with which it began, and the parameters are bitwise identical on all ranks. The loop stays as it is on
    one device, and nothing is wrapped. This is local SGD, with compression; with an outer optimizer it is DiLoCo
    (Douillard et al., arXiv:2311.08105)::

        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        attachment = sync.attach(model, sync.Updates(optimizer, "BlockQuant(bits=4)", every=100, outer=outer))

    Parameters and buffers become those of rank 0. Floating-point buffers that are saved with the model, such as the
    statistics of batch norm, become their mean after each round; all other buffers are each rank's own. Clipping sees
    the gradient of one rank. All ranks make the same number of steps. Inside a round the parameters differ between
    ranks, so evaluate and save models between rounds, or in :meth:`~gckernels.sync.Attachment.shared`. A model that
    loads a ``state_dict`` later on makes the next step raise an error, because the next mean would undo it.

    With ``fragments`` a round sends the model in parts, one after the other, and with ``delay`` the training goes on
    until the mean of a part arrives, beside the communication (Streaming DiLoCo, Douillard et al., arXiv:2501.18512)::

        updates = sync.Updates(optimizer, "BlockQuant(bits=4)", every=100, fragments=4, delay=5)

    The attachment counts synchronisations as steps, of which a round has one for each fragment. Its ``no_sync`` changes
    nothing, ``exact`` is for synchronisations that begin in it, and updates cannot be discarded. Its state resumes a
    training bit for bit, also inside a round: it has the parameters and the state of ``optimizer`` of this rank, the
    parameters with which the round began, the state of ``outer``, and residuals. In a job of another size, each rank
    goes on with the means of the parameters and of the states of ``optimizer``.

    The model is a module with parameters on one device. If it is a DistributedDataParallel model over the ranks that
    average updates, that averages no gradients until ``close``, as in its ``no_sync``. Nor does ``fully_shard`` over
    its replicas, which average updates by default. Ranks of a site may share it, in DistributedDataParallel or by
    ``fully_shard``, with process groups that are less than all ranks; ``process_group`` then has one rank of each site.
    Frozen parameters are not sent.

    Attributes:
        optimizer: the optimizer that steps the model; or a list of all optimizers that do, such as Muon and AdamW. A
            step ends when each of them has made one, in any order, and a second one before that raises an error, as
            does a step of one that was not given. Anything else that changes the model in a round is averaged, too.
            In trainers (:doc:`integrations </howto/trainers>`) it is not given: they know their optimizers.
        plan: a compressor such as ``EFSignSGD()`` or its spec, or a plan for a bare module, whose steps are rounds.
            Results of compressors must be means. Beside a codec of fewer bits, vectors are sent in 8 bits. By default,
            and with an :class:`~gckernels.sync.Auto`, one compressor is found while the model is trained: rounds with
            each of those that ``accuracy`` allows are timed. ``"aggressive"`` allows signs, from the first round on,
            and needs no ``steps``. Times alone decide; ``every`` is always yours.
        every: the number of steps of a round. Rounds may grow: ``{0: 2, 1000: 8, 2000: 8}`` has rounds of two steps, of
            eight from 1000 steps on, and one that ends with step 2000.
        fragments: the number of parts of the model, with about the same number of bytes, which are sent one after the
            other in a round. With more than one, the parameters never are the same on all ranks together; those of a
            fragment are when it arrives.
        delay: the number of steps between the sending of a fragment and the arrival of its mean, at most
            ``every // fragments``. Updates of these steps are kept: they are added to the new parameters, and are sent
            with the next round.
        mixing: the weight of this rank's own parameters when a mean arrives after a delay; the new ones have the
            remaining weight, and updates of the delay are dropped. By default all updates are kept.
        outer: a function that makes an optimizer of a list of parameters, for which the mean update, from the end of
            the round to its start, is a gradient. Its parameters have 32 bits or more. By default the mean is added.
        anchor_device: the device of the parameters with which a round began, and of the state of ``outer``: "cpu" to
            have them in the memory of the host. By default it is that of the model.
        decay: from 0 to 1, by which residuals are multiplied before they are added to the next update. With 1 nothing
            is lost, with 0 no residual is kept. The default is what has been best for signs: 0.8 for rounds of one or
            two steps, and 1 for longer ones; for a plan it is that of its units (``feedback``).
        scale_steps: whether steps of ``optimizer`` are made longer, by a factor for each tensor. An optimizer like Adam
            or Muon makes short steps on one rank, because the gradients of a small batch have more noise than those of
            all ranks. The factor is measured in every round, with 68 bytes per tensor. By default it is for all
            optimizers but those of SGD's class, without ``outer``, if there are rounds of at most four steps.

    :func:`~gckernels.sync.attach` checks the attributes, so that all ranks raise alike.
    """

    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    plan: Plan | Compressor | str | Auto = _SAFE
    _: KW_ONLY
    every: Every = 1
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    outer: Outer | None = None
    anchor_device: torch.device | str | None = None
    decay: float | None = None
    scale_steps: bool | None = None

    @property
    def auto(self) -> Auto | None:
        """The settings by which a compressor is found; ``None`` if one is given. The rule ``"aggressive"`` is replaced:
        signs behind an optimizer lose what safe compressors of gradients lose (``bench/training/updates.py``)."""
        if not isinstance(self.plan, Auto):
            return None
        return replace(self.plan, accuracy=AGGRESSIVE) if self.plan.accuracy == "aggressive" else self.plan

    @property
    def frontend(self) -> type[UpdatesFrontend]:
        """The front end that averages updates."""
        from ..frontends.updates.updates_frontend import UpdatesFrontend

        return UpdatesFrontend

    def request(self, model: object, wrapped: object, given: Request) -> UpdatesRequest:
        """The request of these settings for a model.

        Args:
            model: the model.
            wrapped: the model as it was given, perhaps in DistributedDataParallel.
            given: the request of the other arguments of ``attach``.
        """
        from ..frontends.silence import silence_of
        from ..frontends.updates.schedule import Schedule
        from ..frontends.updates.site_parameters import without_elements
        from ..frontends.updates.updates_request import PLAIN_MEAN, UpdatesRequest

        every = dict(self.every) if isinstance(self.every, Mapping) else self.every
        schedule = Schedule(every, self.fragments, self.delay)
        shared: dict[str, Any] = {each.name: getattr(given, each.name) for each in fields(given)}
        of_updates = {
            "plan": UNCOMPRESSED if isinstance(self.plan, Auto) else self.plan,
            "grad_scaler": None,
            "left_out": given.left_out | without_elements(model),
            "decay": _default_decay(schedule) if self.decay is None and not isinstance(self.plan, Plan) else self.decay,
        }
        return UpdatesRequest(
            **(shared | of_updates),
            given_optimizers=_listed(self.optimizer),
            schedule=schedule,
            mixing=self.mixing,
            outer=PLAIN_MEAN if self.outer is None else self.outer,
            anchor_device=self.anchor_device,
            scalers=() if given.grad_scaler is None else _listed(given.grad_scaler),
            scale_steps=self.scale_steps,
            silence=silence_of(wrapped, given.group),
        )


def _listed(given: Any) -> list[Any]:
    """The things that an argument lists, or the argument itself if it is no list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def _default_decay(schedule: Schedule) -> float:
    """The decay that has been best for signs (``bench/training/updates.py``)."""
    return 0.8 if schedule.has_rounds_of(_DECAYING) else 1.0
