"""Every command that a page shows is one that exists; tests/commands runs them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from kpool_graph.cli import _parser
from shown import PAGES, ROOT, shown_commands

TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
TASKS = set(
    re.findall(r"^\[tasks\.([a-z-]+)\]", (ROOT / "pixi.toml").read_text(), re.MULTILINE)
)
# Tools of others, and what `make bench-gpu` packs.
FOREIGN = {"max", "curl", "pip", "tar", "kpool-gpu-bench/run"}


def problem(command: str) -> str:
    """Says what is wrong with a command, or nothing."""
    words = shlex.split(command)
    tool, *rest = words
    if tool == "make":
        names = [word for word in rest if "=" not in word]
        return "" if names and set(names) <= TARGETS else "no such target"
    if words[:2] == ["pixi", "run"]:
        return "" if words[2] in TASKS else "no such task"
    if words[:3] == ["python", "-m", "kpool_graph"]:
        tool, rest = "kpool", rest[2:]
    if tool == "kpool":
        try:
            _parser().parse_args(rest)
        except SystemExit:
            return "kpool refuses the arguments"
        return ""
    if words[:2] == ["python", "-m"]:
        return "" if importlib.util.find_spec(words[2]) else "no such module"
    if tool == "python":
        return "" if (ROOT / rest[0]).is_file() else "no such file"
    return "" if tool in FOREIGN else "unknown tool"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page_exists(page: Path) -> None:
    wrong = {command: problem(command) for command in shown_commands(page)}
    assert {command: what for command, what in wrong.items() if what} == {}


def test_commands_are_found_and_judged() -> None:
    readme = shown_commands(ROOT / "README.md")
    assert {"make demo", "pixi run test", "pip install '.[serve]'"} <= set(readme)
    (curl,) = [
        command
        for command in shown_commands(ROOT / "examples/serve/README.md")
        if command.startswith("curl")
    ]
    assert curl.endswith("}'")
    for command in (
        "make nothing",
        "pixi run nothing",
        "kpool nothing",
        "python -m kpool_graph trace --nothing",
        "python examples/nothing.py",
        "nothing at all",
    ):
        assert problem(command), command
