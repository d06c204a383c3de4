"""The command ``gckernels``: one module for each verb, which says its arguments and runs them.

A verb is a module of this folder with the name of the verb and the two functions of :class:`~.dispatch.Verb`. It
returns its results as an :class:`~.outcome.Outcome`, which :mod:`~.dispatch` writes and prints, and refuses by raising
a :class:`~.outcome.CommandError`. One line in :data:`~.dispatch.VERBS` adds it to the command.
"""

from .dispatch import main

__all__ = ["main"]
