"""The method by which attachments and synchronizers write reports."""

from __future__ import annotations

import os

from ..frontends.handle import Handle
from ..plans.json_files import write_whole


class Reported(Handle):
    """A handle that writes reports."""

    def report(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Write a page about the training so far: its plan, its steps and decisions, and the lanes of a traced step.

        One HTML file, which needs no network and no other file, for small and large screens::

            if dist.get_rank() == 0:
                attachment.report("report.html")

        It shows what this rank knows. Communicates nothing, so any rank can call it, at any time; ranks that write at
        the same time need different paths. A page that exists is replaced as a whole.

        Args:
            path: path of the file.
            title: name of the training, for the title; by default the name of the model, if the plan has one.

        Raises:
            OSError: the file cannot be written. If there was one, it is as it was.
        """
        from .collecting import collected  # late: most trainings write no report
        from .page import render

        write_whole(path, render(collected(self, title)))
