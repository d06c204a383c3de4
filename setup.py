"""The parts of a build that ``pyproject.toml`` cannot state; it holds all metadata but the long description."""

import os
import re
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build
from setuptools.command.sdist import sdist


def for_an_index(readme: str) -> str:
    """The README without pictures and comments, and with the paths of files instead of links to them.

    On a package index there is no repository that relative links could lead into. The paths are those of the source
    distribution.
    """
    readme = re.sub(r"<!--.*?-->\n*|^!\[.*?\]\(.*?\)\n*", "", readme, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#]*)[^)]*\)", r"\1 [`\2`]", readme)


class Build(build):
    """A build in an empty folder; one in ``build/`` would install modules again that have been renamed."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.folder = tempfile.TemporaryDirectory()  # removed together with this object
        self.build_base = self.folder.name


class SourceDistribution(sdist):
    """A source distribution with the links in ``gckernels/``, so that the package can be imported from it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for part in ("sync", "patches", "planner"):
            os.symlink(f"../{part}", Path(base_dir, "gckernels", part))


setup(
    cmdclass={"build": Build, "sdist": SourceDistribution},
    long_description=for_an_index(Path("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
