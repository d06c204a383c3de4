"""Text, names and pairs that callers may write in the place of objects: a compressor's spec, the name of a program,
names of parameters, machines and devices. Each function returns the object; one that it is given, it returns as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import torch
from torch.amp import GradScaler

from gckernels.method import Method, from_spec

from ..programs.named import PROGRAMS
from ..programs.steps import Program, Step
from ..programs.topology import Topology
from .parameters import plain_name

Exempt: TypeAlias = Callable[[str, torch.nn.Parameter], bool]


def as_method(what: str, given: object, otherwise: str = "") -> Method:
    """The compressor that ``given`` is, or that it names as :func:`gckernels.from_spec` reads it.

    Args:
        what: the caller and its argument, for errors: ``"attach: compressor_or_plan"``.
        given: a method, or a spec such as ``"BlockQuant(bits=4)"``.
        otherwise: what else the argument may be, for errors.

    Raises:
        TypeError: it is neither.
        ValueError: a spec that names no compressor, or a value that the compressor refuses.
    """
    if isinstance(given, Method):
        return given
    if isinstance(given, str):
        try:
            return from_spec(given)
        except ValueError as error:
            raise ValueError(f"{what} cannot be {given!r}: {error}") from error
    got = type(given).__name__
    if isinstance(given, type):
        got = f"the class {given.__name__}"
        got += f"; write {given.__name__}()" if issubclass(given, Method) else ""
    raise TypeError(
        f"{what} must be a compressor such as gckernels.EFSignSGD(), or its spec such as 'BlockQuant(bits=4)'"
        f"{otherwise}, got {got}"
    )


def as_scaler(what: str, given: object) -> GradScaler | None:
    """The gradient scaler that ``given`` is; ``None`` for one that is not enabled, and for ``None``.

    Raises:
        TypeError: it is neither.
    """
    if given is not None and not isinstance(given, GradScaler):
        raise TypeError(f"{what}: grad_scaler must be a torch.amp.GradScaler or None, got {type(given).__name__}")
    return given if given is not None and given.is_enabled() else None


def as_program(what: str, given: Program | str | None) -> Program | None:
    """The program that ``given`` is, or that it names in :data:`~.strategies.PROGRAMS`, in capitals or not.

    Raises:
        TypeError: it is neither ``None`` nor a name nor a tuple of steps.
        ValueError: there is no program of this name.
    """
    if given is None or (isinstance(given, tuple) and all(isinstance(step, Step) for step in given)):
        return given
    names = f"a name ({', '.join(PROGRAMS)})"
    if isinstance(given, str):
        if given.lower() not in PROGRAMS:
            raise ValueError(f"{what}: program must be {names} or a tuple of steps, got {given!r}")
        return PROGRAMS[given.lower()]
    raise TypeError(f"{what}: program must be None, {names} or a tuple of steps such as (Encode(),), got {given!r}")


def as_topology(what: str, given: Topology | Iterable[int] | None) -> Topology | None:
    """The topology that ``given`` is, or that ``(machines, devices)`` means.

    Raises:
        TypeError: it is neither ``None`` nor a topology nor a pair.
        ValueError: the numbers are not integers from 1 up.
    """
    if given is None or isinstance(given, Topology):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"{what}: topology must be None, a Topology or a pair (machines, devices), got {given!r}")
    try:
        return Topology(*given)
    except ValueError as error:
        raise ValueError(f"{what}: topology cannot be {given!r}: {error}") from error


def as_exempt(what: str, given: Exempt | Iterable[str] | None, names: Collection[str]) -> Exempt:
    """The rule that ``given`` is, or that exempts the parameters that it lists: none if it is ``None``.

    Args:
        what: the caller, for errors.
        given: a rule, names of parameters, or ``None``.
        names: of all parameters, plain.

    Raises:
        TypeError: it is none of them.
        ValueError: it lists a name that is not among ``names``.
    """
    if callable(given):
        return given
    if given is None:
        given = ()
    listed: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if not all(isinstance(name, str) for name in listed):
        allowed = "None, a function (name, parameter) -> bool, or a list of parameters' names"
        raise TypeError(f"{what}: exempt must be {allowed}, got {given!r}")
    listed = [plain_name(name) for name in listed]
    if unknown := [repr(name) for name in listed if name not in names]:
        shown = ", ".join(unknown[:10]) + (", ..." if len(unknown) > 10 else "")
        raise ValueError(f"{what}: exempt names what is not a parameter that needs a gradient: {shown}")
    chosen = frozenset(listed)
    return lambda name, parameter: name in chosen
