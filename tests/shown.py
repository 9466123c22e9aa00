"""The commands that the pages show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_INLINE = re.compile(
    r"`((?:make|pixi run|kpool|python -m) [a-z][^`]*|pip install ['.][^`]*)`"
)


def shown_commands(page: Path) -> list[str]:
    """Lists a page's commands.

    Args:
        page: The page.

    Returns:
        What a reader would type: of the text first, then of the blocks, in order.
    """
    text = page.read_text(encoding="utf-8")
    found = [" ".join(command.split()) for command in _INLINE.findall(text)]
    for block in _BLOCK.findall(text):
        command = ""
        for line in block.replace("\\\n", " ").splitlines():
            command += re.sub(r" +#.*", "", line)
            # A quoted argument may go on, on the next line.
            if command.count("'") % 2 == 0:
                found.append(" ".join(command.split()))
                command = ""
    return [command for command in found if command]
