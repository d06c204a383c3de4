"""C texts that lie beside modules."""

from __future__ import annotations

from importlib import resources


def program_text(package: str, *names: str) -> str:
    """The C text of files beside the modules of a package, one behind the other. The package may lie in a zip file.

    Args:
        package: dotted name of the package.
        names: names of the files.
    """
    folder = resources.files(package)
    return "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
