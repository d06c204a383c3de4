"""Conversion of what callers may write instead of objects: a compressor's spec, a program's name, lists of parameters'
names, pairs of machines and devices. Each function returns the object; an object that it is given, it returns as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from gckernels.codec import Codec
from gckernels.compressor import Compressor, from_spec
from gckernels.ops import BlockQuant, Cast16, Identity

from ..programs.named import PROGRAMS
from ..programs.steps import Program, ProgramError, Step
from ..programs.topology import Topology

Exempt: TypeAlias = Callable[[str, torch.nn.Parameter], bool]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Attributes in which torch.compile and activation checkpointing keep the module that they wrap."""


def plain_name(name: str) -> str:
    """The name of a parameter in the model as it was written, without the modules that torch.compile and activation
    checkpointing wrap around others: ``"0._orig_mod.weight"`` becomes ``"0.weight"``."""
    parts = name.split(".")
    return name if _WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in _WRAPPERS)


def differentiable(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.nn.Parameter]:
    """The parameters that can have a gradient, by their plain names. Frozen ones are included, integers are not.

    Raises:
        ValueError: two parameters have the same plain name.
    """
    named: dict[str, torch.nn.Parameter] = {}
    for full_name, parameter in parameters:
        name = plain_name(full_name)
        if name in named:
            raise ValueError(f"two parameters are called {name} where torch.compile is not counted: rename one of them")
        if parameter.is_floating_point() or parameter.is_complex():
            named[name] = parameter
    return named


def as_named_parameters(caller: str, given: object) -> dict[str, torch.nn.Parameter]:
    """The parameters of a module, or of pairs of name and parameter, that can have a gradient, by their plain names.

    Raises:
        TypeError: ``given`` is neither a module nor such pairs.
        ValueError: two parameters have the same plain name.
    """
    if isinstance(given, torch.nn.Module):
        return differentiable(given.named_parameters())
    pairs = list(given) if isinstance(given, Iterable) else None
    if pairs is None or not all(map(_is_named_parameter, pairs)):
        allowed = "a torch.nn.Module, or pairs of name and parameter such as module.named_parameters()"
        raise TypeError(f"{caller}: model must be {allowed}, got {_described(given)}")
    return differentiable(pairs)


def _is_named_parameter(pair: object) -> bool:
    match pair:
        case (str(), torch.Tensor()):
            return True
    return False


def _described(given: object) -> str:
    kind = type(given).__name__
    return f"{kind}; call its items()" if isinstance(given, Mapping) else kind


def as_method(argument: str, given: object, otherwise: str = "") -> Compressor:
    """The compressor that ``given`` is, or of which it is a spec that :func:`gckernels.from_spec` reads.

    Args:
        argument: the caller and its argument, for errors: ``"plan: compressor"``.
        given: a method, or a spec such as ``"BlockQuant(bits=4)"``.
        otherwise: what else the argument may be, for errors.

    Raises:
        TypeError: ``given`` is neither a method nor text.
        ValueError: the spec names no compressor, or has a value that the compressor refuses.
    """
    if isinstance(given, Compressor):
        return given
    if isinstance(given, str):
        try:
            return from_spec(given)
        except ValueError as error:
            raise ValueError(f"{argument} cannot be {given!r}: {error}") from error
    got = type(given).__name__
    if isinstance(given, type):
        got = f"the class {given.__name__}"
        got += f"; write {given.__name__}()" if issubclass(given, Compressor) else ""
    otherwise = f"{otherwise}, " if otherwise else ""
    raise TypeError(
        f"{argument} must be {otherwise}a compressor such as gckernels.EFSignSGD(), or its spec such as "
        f"'BlockQuant(bits=4)', got {got}"
    )


GATHERED_BY = (BlockQuant, Cast16, Identity)
"""The compressors of parameters that are gathered."""
_DIRECT_BITS = 8
"""The bits from which parameters are sent themselves. With fewer, their error shows in the loss, and differences to a
copy are sent."""


def as_weights(argument: str, given: object) -> Codec:
    """The compressor of gathered parameters that ``given`` is, or of which it is a spec.

    Raises:
        TypeError, ValueError: it is none that parameters may be gathered with.
    """
    method = as_method(argument, given, otherwise="None")
    if not isinstance(method, GATHERED_BY):
        raise ValueError(f"{argument} must be None, BlockQuant, Cast16 or Identity, got {method}")
    return method


def sends_differences(weights: Codec) -> bool:
    """Whether a compressor of gathered parameters encodes differences to a copy that every rank keeps. They are sent in
    forward, and nothing in backward."""
    return isinstance(weights, BlockQuant) and weights.bits < _DIRECT_BITS


def as_program(caller: str, given: Program | str | None) -> Program | None:
    """The program that ``given`` is, or whose name it is in :data:`~gckernels.sync.programs.PROGRAMS`, in any case, or
    whose text it is for :func:`~gckernels.sync.programs.parse`.

    Raises:
        TypeError: ``given`` is neither ``None`` nor a text nor a tuple of steps.
        ValueError: the text is neither a name nor that of a program.
    """
    if given is None or (isinstance(given, tuple) and all(isinstance(step, Step) for step in given)):
        return given
    names = f"a name ({', '.join(PROGRAMS)}), a text such as 'E AG D'"
    if isinstance(given, str):
        if given.lower() in PROGRAMS:
            return PROGRAMS[given.lower()]
        from ..programs.texts import parse

        try:
            return parse(given)
        except ProgramError as error:
            raise ValueError(f"{caller}: program must be {names} or a tuple of steps, got {given!r}: {error}") from None
    raise TypeError(f"{caller}: program must be None, {names} or a tuple of steps such as (Encode(),), got {given!r}")


def as_topology(caller: str, given: Topology | Iterable[int] | None) -> Topology | None:
    """The topology that ``given`` is, or the topology of a pair ``(machines, devices)``.

    Raises:
        TypeError: ``given`` is neither ``None`` nor a topology nor a pair.
        ValueError: the numbers are not integers from 1 up.
    """
    if given is None or isinstance(given, Topology):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"{caller}: topology must be None, a Topology or a pair (machines, devices), got {given!r}")
    try:
        return Topology(*given)
    except ValueError as error:
        raise ValueError(f"{caller}: topology cannot be {given!r}: {error}") from error


def as_exempt(caller: str, given: Exempt | Iterable[str] | None, names: Collection[str]) -> Exempt:
    """The rule of exemption that ``given`` is, or one that exempts the parameters it lists. ``None`` exempts nothing.

    Args:
        caller: for errors.
        given: a rule, names of parameters, or ``None``.
        names: the plain names of all parameters.

    Raises:
        TypeError: ``given`` is none of these.
        ValueError: ``given`` lists a name that is not in ``names``.
    """
    if callable(given):
        return given
    if given is None:
        given = ()
    listed: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if not all(isinstance(name, str) for name in listed):
        allowed = "'default', None, a function (name, parameter) -> bool, or a list of parameters' names"
        raise TypeError(f"{caller}: exempt must be {allowed}, got {given!r}")
    listed = [plain_name(name) for name in listed]
    if unknown := [repr(name) for name in listed if name not in names]:
        some = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise ValueError(f"{caller}: exempt must list parameters that need a gradient, got {some}")
    chosen = frozenset(listed)
    return lambda name, parameter: name in chosen
