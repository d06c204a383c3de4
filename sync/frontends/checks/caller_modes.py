"""Calls that build tensors for later steps, whatever mode of autograd their caller is in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """The function, called outside of ``torch.inference_mode``. A tensor that is made in that mode can never be changed
    outside of it, and backward changes what this function makes."""

    @functools.wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        with torch.inference_mode(False):
            return function(*arguments, **named)

    return called
