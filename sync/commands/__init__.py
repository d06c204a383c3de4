"""The command ``gckernels``: one module for each verb, which says its arguments and runs them.

A verb is a module of this folder with the name of the verb and the two functions of :class:`~.verbs.Verb`. It prints
through its :class:`~.console.Console`, writes files through :mod:`~.files`, and refuses by raising a
:class:`~.outcome.CommandError`. One line in :data:`~.verbs.VERBS` adds it to the command.
"""

from .dispatch import main

__all__ = ["main"]
