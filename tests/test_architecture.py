"""Imports go one way, files stay short, and the pages name every file."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "kpool_graph"
LONGEST = 400

# Who may import whom, from below; what is not named may import everything above it.
REFERENCE = {"bfloat16", "reference", "reference_ragged", "reference_indexer"}
FILES = {"_versions", "_shipped", "_library"}
GROUND = FILES | {"_validate", "_rows", "_slot_state", "_batching"}
BUILDERS = {"ops", "pools", "copies"}
BUFFERS = {"buffers", "ring", "slots"}
ALLOWED = {
    **dict.fromkeys(REFERENCE, REFERENCE),
    **dict.fromkeys(GROUND - {"_library"}, frozenset()),
    "_library": FILES,
    **dict.fromkeys(BUILDERS, GROUND),
    **dict.fromkeys(BUFFERS, REFERENCE | GROUND | BUFFERS),
}
# What nothing but a command or itself may need.
TOPS = ("nn", "serve", "testing")


def kernel_layers() -> list[str]:
    """Lists the kernels' files in the order of the page's table."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \w[\w ]* \| (.+) \|$", page, re.MULTILINE)
    return re.findall(r"`(\w+)`", " ".join(rows[1:]))


def kernel_imports(path: Path) -> set[str]:
    return set(re.findall(r"^from \.(\w+) import", path.read_text(), re.MULTILINE))


def python_imports(path: Path) -> set[str]:
    """Names the modules of this package that a file imports, at any time."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        if node.module:
            found.add(node.module.partition(".")[0])
        else:
            found |= {alias.name for alias in node.names}
    return {name for name in found if (PACKAGE / f"{name}.py").is_file()} | (
        found & set(TOPS)
    )


def test_the_page_names_every_kernel_file_once():
    names = {path.stem for path in (ROOT / "kernels").glob("*.mojo")} - {"__init__"}
    layers = kernel_layers()
    assert sorted(layers) == sorted(names)


def test_a_kernel_file_imports_only_what_stands_before_it():
    before: set[str] = set()
    for name in kernel_layers():
        unknown = kernel_imports(ROOT / "kernels" / f"{name}.mojo") - before
        assert not unknown, f"{name} imports {unknown}"
        before.add(name)


@pytest.mark.parametrize("name", ALLOWED)
def test_a_module_below_imports_none_above(name: str):
    assert python_imports(PACKAGE / f"{name}.py") <= ALLOWED[name] - {name}


@pytest.mark.parametrize("top", TOPS)
def test_what_users_import_by_name_is_imported_by_no_part_of_the_core(top: str):
    importers = {
        path.stem
        for path in PACKAGE.glob("*.py")
        if top in python_imports(path) and path.stem != top
    }
    # The commands may; they are imported when they run.
    assert importers <= {"serve_demo"}


def test_the_reference_needs_no_max():
    for name in REFERENCE:
        text = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) max\b", text, re.MULTILINE), name


def test_no_source_is_longer_than_it_can_be_read():
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.mojo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert listed
    lengths = {
        name: len((ROOT / name).read_text(encoding="utf-8").splitlines())
        for name in listed
        if (ROOT / name).is_file()
    }
    assert {name for name, lines in lengths.items() if lines > LONGEST} == set()
