"""The contract of codecs, and the table of codecs.

A codec turns a flat gradient vector (a *unit*) into a *payload*, a ``uint8`` vector whose size is known in
advance, and back. It is a frozen dataclass: its fields are its configuration, and it has no state. The caller passes in
the state that an algorithm keeps from step to step (the residual of error feedback).

A unit may be cut into ``chunks`` equal parts (the last ones shorter, or empty), each with a separate payload; an
all-to-all then sends chunk ``c`` to rank ``c``. :func:`chunk_numel` defines how a unit is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from .compressor import Compressor
from .devices import is_accelerator
from .toolkit.kernels.launch import temporary
from .toolkit.values import as_int, as_seed, as_size, require_bool, require_number, require_tensors

CHUNK_ALIGN = 16  # elements: every chunk of an aligned unit starts on a 16-byte boundary, for 2-byte dtypes too
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def chunk_numel(numel: int, chunks: int) -> int:
    """Elements per chunk when a unit of ``numel`` elements is cut into ``chunks``; a multiple of 16.

    Chunk ``c`` holds the elements ``[c * size, min((c + 1) * size, numel))``. With one chunk the size is ``numel``
    itself.

    >>> gckernels.chunk_numel(100, 4)  # chunks of 32, 32, 32 and 4 elements
    32
    >>> gckernels.chunk_numel(5, 4)  # one chunk of 5 elements, three empty ones
    16
    """
    if chunks == 1:
        return numel
    size = -(-numel // chunks)
    return -(-size // CHUNK_ALIGN) * CHUNK_ALIGN


def chunk_bounds(numel: int, size: int, chunk: int) -> tuple[int, int]:
    """``(start, stop)`` of chunk ``chunk`` of ``size`` elements in a unit of ``numel``; empty when past the end."""
    start = min(chunk * size, numel)
    return start, min(start + size, numel)


@dataclasses.dataclass(frozen=True)
class Codec(Compressor):
    """Base of all one-shot codecs. Subclasses are frozen dataclasses, put into the table by :func:`register`."""

    op_name: ClassVar[str] = ""
    """Stem of the names of the torch ops, ``<op_name>_encode`` and so on; set by ``register``."""
    encode_op: ClassVar[Any]
    decode_op: ClassVar[Any]
    recode_op: ClassVar[Any]
    """The torch ops; set by ``register``."""
    config_fields: ClassVar[tuple[str, ...]]
    """Names of the fields, in order; set by ``register``."""
    host: ClassVar[Backend]
    """The implementation for tensors on the CPU; a family of compressors sets it."""
    triton: ClassVar[Backend]
    """The implementation for tensors on accelerators and, in Triton's interpreter, on the CPU; a family sets it."""

    @classmethod
    def backend(cls, device: torch.device) -> Backend:
        """The implementation for tensors on a device."""
        return cls.triton if is_accelerator(device) else cls.host

    def compile_host(self, recodes: bool = False) -> None:
        self.host.compile(self, recodes)

    # ---------------------------------------------------------------- what users and the engine call

    @abstractmethod
    def payload_nbytes(self, numel: int) -> int:
        """Exact size in bytes of the payload of ``numel`` elements (``numel >= 0``); a multiple of 16."""

    @property
    def encodes_residuals(self) -> bool:
        """Whether residuals may be in 8 bits, ``uint8``, instead of fp32."""
        return False

    @property
    def shard_compressor(self) -> Codec:  # a codec's is a codec
        return self

    def round_nbytes(self, numel: int, index: int) -> int:
        return 0 if index else self.payload_nbytes(numel)

    def encode(
        self,
        grad: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        seed: int = 0,
        scale: float = 1.0,
        size: int | None = None,
    ) -> None:
        """Encode ``grad`` (plus ``residual``) into ``payload``, and keep the encoding error in ``residual``.

        With ``p = grad + residual``: ``payload = C(scale * p)`` and ``residual = p - D(payload) / scale``, in one
        pass if the algorithm allows. An element of the residual whose difference is not finite keeps its old value, so
        inf and NaN never enter the residual.

        Args:
            grad: ``[numel]``, contiguous, fp32, bf16 or fp16.
            residual: ``[states * numel]``, contiguous, fp32, changed in place; ``None`` for no error feedback. Zeros
                at first. If :attr:`encodes_residuals`, it may also be in 8 bits: ``uint8 [chunks,
                gckernels.residual_nbytes(size)]``, see :mod:`gckernels.toolkit.residuals`. Then the new residual is
                rounded to 8 bits, which loses at most a 127th of the largest one of 256 neighbours.
            payload: ``uint8``, ``[payload_nbytes(numel)]`` or, to cut the unit into chunks,
                ``[chunks, payload_nbytes(chunk_numel(numel, chunks))]``, rows contiguous, 16-byte aligned. Every byte
                is written.
            seed: seed of stochastic compressors, 64 bits: from ``-2**63`` to ``2**64 - 1``. The same seed gives the
                same bytes.
            size: elements that every payload is laid out for; by default ``chunk_numel(numel, chunks)``. More than that
                for the short last shard of a unit, whose payload must be as large as the others'.
            scale: factor on what is sent; summable compressors only (``1 / world_size`` keeps fp16 sums in range).

        Raises:
            TypeError, ValueError: naming the argument; nothing has been changed.
        """
        name = f"{self.name}.encode"
        require_tensors(name, grad=grad, payload=payload, **({} if residual is None else {"residual": residual}))
        require_number(name, "scale", scale)
        seed, size = as_seed(name, seed), as_size(name, size)
        self.encode_op(grad, residual, payload, *self.config(), seed, scale, size)

    def decode(
        self,
        payloads: torch.Tensor,
        out: torch.Tensor,
        scale: float = 1.0,
        accumulate: bool = False,
        size: int | None = None,
    ) -> None:
        """Decode and merge: ``out = [out +] scale * sum over sources of D(payload)``, in source order, in fp32.

        A payload that is damaged (wrong status word) or was encoded from inf or NaN decodes to NaN. Memory outside
        ``out`` is never written, for any bytes.

        Args:
            payloads: ``uint8``, ``[nbytes]``, ``[sources, nbytes]`` or ``[sources, chunks, nbytes]`` with
                ``nbytes == payload_nbytes(size)``; last dimension contiguous, 16-byte aligned.
            out: ``[numel]``, contiguous, fp32, bf16 or fp16.
            scale: factor on the sum, ``1 / sources`` for the mean.
            accumulate: whether to add to the values of ``out``.
            size: elements that every payload is laid out for, as in :meth:`encode`.

        Raises:
            TypeError, ValueError: naming the argument; nothing has been changed.
        """
        name = f"{self.name}.decode"
        require_tensors(name, payloads=payloads, out=out)
        require_number(name, "scale", scale)
        require_bool(name, "accumulate", accumulate)
        self.decode_op(payloads, out, *self.config(), scale, accumulate, as_size(name, size))

    def recode(
        self,
        payloads: torch.Tensor,
        residual: torch.Tensor | None,
        payload: torch.Tensor,
        numel: int,
        scale: float = 1.0,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        """Decode, merge and encode again, as the owner of a shard does.

        The result equals that of :meth:`decode` into an fp32 vector and :meth:`encode` of it by
        :attr:`shard_compressor`, bit for bit. If the algorithm allows, the vector is never stored.

        Args:
            payloads: ``uint8``, ``[sources, payload_nbytes(size)]``, last dimension contiguous, 16-byte aligned.
            residual: as in :meth:`encode`, of :attr:`shard_compressor`: ``[shard_compressor.traits.states * numel]``,
                or in 8 bits with one row.
            payload: ``uint8``, ``[payload_nbytes(size)]``, contiguous, 16-byte aligned; every byte is written. Not
                one of ``payloads``.
            numel: elements of the shard.
            scale: factor on the sum, ``1 / sources`` for the mean.
            seed: as in :meth:`encode`.
            size: elements that every payload is laid out for, at least ``numel``; by default ``numel``.

        Raises:
            TypeError, ValueError: naming the argument; nothing has been changed.
        """
        name = f"{self.name}.recode"
        require_tensors(
            name, payloads=payloads, payload=payload, **({} if residual is None else {"residual": residual})
        )
        require_number(name, "scale", scale)
        numel, seed, size = as_int(name, "numel", numel, 0), as_seed(name, seed), as_size(name, size)
        self.recode_op(payloads, residual, payload, numel, *self.config(), scale, seed, size)

    # ---------------------------------------------------------------- what an algorithm's file provides

    def accumulate(self, grad: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Specification of the accumulated states, ``[states * numel]`` in fp32.

        The last ``numel`` elements are the values to encode; the elements before them are new values of the other
        states.
        """
        return grad + residual

    def keep(self, values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        """Specification of the new residual, ``[states * numel]`` in fp32.

        An element keeps the old values of all its states if one of the new ones is not finite.

        Args:
            values: result of :meth:`accumulate`.
            decoded: decoded values, ``[numel]``.
        """
        return values - decoded

    def merge(self, total: torch.Tensor, scale: float) -> torch.Tensor:
        """Specification of merging, in fp32: the result for ``total``, the sum of the decodings of all sources."""
        return total * scale

    @abstractmethod
    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        """Specification of encoding: the payload, ``uint8 [payload_nbytes(numel)]``, of fp32 values.

        ``values`` has at most ``numel`` elements: fewer, even none, in the last chunks of a unit. ``first`` is the
        position of ``values[0]`` in the unit: the counter of its random number.
        """

    @abstractmethod
    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Specification of decoding: the values, fp32 ``[numel]``, of a payload."""

    # ---------------------------------------------------------------- configuration

    def config(self) -> tuple[Any, ...]:
        """The fields' values, in order: the configuration arguments of the torch ops."""
        return tuple([getattr(self, name) for name in self.config_fields])  # in every call of an op: the fastest way


CODECS: dict[str, type[Codec]] = {}
"""Every codec by name, a subset of :data:`~gckernels.compressor.COMPRESSORS`. All of them have ops and are covered by
the conformance tests and the benchmarks."""


# -------------------------------------------------------------------- implementations

SEED_MASK = 2**63 - 1

Work = Callable[[], None]
"""The work of units that are bound together, in one step."""


def number_in(added: torch.Tensor | None) -> int:
    """The number in a tensor on the CPU that is added to seeds; 0 without a tensor."""
    return 0 if added is None else int(added)


@dataclasses.dataclass(eq=False, slots=True)  # not frozen: every call of an op makes one, in a third of the time
class Encoding:
    """The arguments of :meth:`Codec.encode` for one unit, without ``scale``. For a :class:`Backend` ``payload`` is
    ``[chunks, nbytes]`` and ``size`` a number."""

    compressor: Any  # a Compressor; a back end knows of which family
    grad: torch.Tensor
    residual: torch.Tensor | None
    payload: torch.Tensor
    seed: int = 0
    size: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Decoding:
    """The arguments of :meth:`Codec.decode` for one unit, without ``scale`` and ``accumulate``. For a
    :class:`Backend` ``payloads`` is ``[sources, chunks, nbytes]`` and ``size`` a number."""

    compressor: Any  # a Compressor; a back end knows of which family
    payloads: torch.Tensor
    out: torch.Tensor
    size: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Recoding:
    """The arguments of :meth:`Codec.recode` for one unit, without ``scale``. For a :class:`Backend` ``size`` is a
    number."""

    compressor: Any  # a Compressor; a back end knows of which family
    payloads: torch.Tensor
    residual: torch.Tensor | None
    payload: torch.Tensor
    numel: int
    seed: int = 0
    size: Any = None


class _OnFirstUse:
    def __init__(self, make: Callable[[], Backend]) -> None:
        self._made = functools.cache(make)

    def __get__(self, instance: object, owner: object) -> Backend:
        return self._made()


def on_first_use(make: Callable[[], Backend]) -> Any:
    """A class attribute that is the back end which ``make`` returns, called when the attribute is first read.

    A family of codecs imports a back end inside ``make``: a training uses those of its compressors on one kind of
    device, and loads no others.
    """
    return _OnFirstUse(make)


class Backend(ABC):
    """Implementation of a family of compressors on one kind of device.

    The arguments of all methods have been checked, by :mod:`gckernels.arguments`. Units that are bound together have
    equal compressors and are on one device.
    """

    @abstractmethod
    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        """Do what :meth:`~gckernels.Codec.encode` says."""

    @abstractmethod
    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        """Do what :meth:`~gckernels.Codec.decode` says."""

    def recode(self, unit: Recoding, scale: float = 1.0) -> None:
        """Do what :meth:`~gckernels.Codec.recode` says; by default in two steps.

        ``shard_compressor`` is of the same family as its compressor.
        """
        merged = temporary(unit.numel, dtype=torch.float32, device=unit.payload.device)
        self.decode(Decoding(unit.compressor, unit.payloads[:, None], merged, unit.size), scale)
        shard = unit.compressor.shard_compressor
        self.encode(Encoding(shard, merged, unit.residual, unit.payload[None], unit.seed, unit.size))

    def compile(self, compressor: Any, recodes: bool) -> None:  # noqa: B027, most have nothing to compile
        """Do what :meth:`~gckernels.Compressor.compile_host` says."""

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        """A function that encodes all units, by default one after the other.

        Args:
            units: the units.
            scale: as for :meth:`encode`.
            added: int64, one number on the device of the units. At every call it is added to all seeds, modulo 2**63.
        """

        def work() -> None:
            number = number_in(added)
            for unit in units:
                seed = (unit.seed + number) & SEED_MASK
                self.encode(Encoding(unit.compressor, unit.grad, unit.residual, unit.payload, seed, unit.size), scale)

        return work

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        """A function that decodes all units, by default one after the other."""

        def work() -> None:
            for unit in units:
                self.decode(unit, scale, accumulate)

        return work

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        """A function that recodes all units, by default one after the other, with the same ``added`` as encodings."""

        def work() -> None:
            number = number_in(added)
            for unit in units:
                self.recode(dataclasses.replace(unit, seed=(unit.seed + number) & SEED_MASK), scale)

        return work
