"""`make docs` writes a page for every public module, with every public name.

But for `kpool_graph.serve`, which tests/commands looks at: it needs modular.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kpool_graph

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages that the make target's own command writes, by module."""
    recipe = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv-serve/.installed", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    setting, *command = recipe.split()
    # Without it, nothing of MAX's own is documented: what does not resolve is ours.
    for word in ("kpool_graph.serve", "-W", "ignore:Error"):
        command.remove(word)
    environment = {**os.environ, **dict([setting.split("=")])}
    where = command.index("build/docs")
    command[0], command[where] = sys.executable, str(tmp_path_factory.mktemp("docs"))
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0 and not run.stderr, run.stderr
    folder = Path(command[where])
    return {
        ".".join(page.relative_to(folder).with_suffix("").parts): page.read_text(
            "utf-8"
        )
        for page in folder.rglob("*.html")
    }


def test_every_public_module_has_a_page(pages):
    modules = {
        path.stem
        for path in (ROOT / "python/kpool_graph").glob("reference*.py")
        if not path.stem.startswith("_")
    } | {"nn", "testing"}
    assert {f"kpool_graph.{name}" for name in modules} | {"kpool_graph"} < set(pages)


@pytest.mark.parametrize("name", set(kpool_graph.__all__) - {"__version__"})
def test_every_public_name_is_on_the_page_with_its_words(name, pages):
    section = re.search(
        rf'<section id="{name}">(.*?)</section>', pages["kpool_graph"], re.DOTALL
    )
    assert section and 'class="docstring"' in section[1]
