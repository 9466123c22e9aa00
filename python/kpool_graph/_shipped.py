"""Where the files are that ship with the package and are not Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def shipped(name: str) -> list[Path]:
    """Lists where a folder may be.

    Args:
        name: The folder, as the source tree's root has it.

    Returns:
        The one inside the installed package, then the source tree's.
    """
    package = Path(__file__).resolve().parent
    return [package / name, package.parents[1] / name]


def first_with(pattern: str, folders: Sequence[Path]) -> Path:
    """Finds the folder that has what it should have.

    Args:
        pattern: Glob of a file that tells.
        folders: Where to look, in this order.

    Returns:
        The first folder with such a file.

    Raises:
        FileNotFoundError: If none has one; the message says where it looked.
    """
    for folder in folders:
        if any(folder.glob(pattern)):
            return folder
    raise FileNotFoundError(f"looked in {' and '.join(map(str, folders))}")
