"""Every command that a page shows is one that exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from kpool_graph.cli import _parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`((?:make|pixi run|kpool|python -m) [a-z][^`]*)`")
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
TASKS = set(
    re.findall(r"^\[tasks\.([a-z-]+)\]", (ROOT / "pixi.toml").read_text(), re.MULTILINE)
)
# Tools of others, and what `make bench-gpu` packs: known by name only.
FOREIGN = {"max", "curl", "pip", "tar", "kpool-gpu-bench/run"}


def commands(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8")
    found = [" ".join(command.split()) for command in INLINE.findall(text)]
    for block in BLOCK.findall(text):
        command = ""
        for line in block.replace("\\\n", " ").splitlines():
            command += line + "\n"
            # A quoted argument may go on, on the next line.
            if command.count("'") % 2 == 0:
                found.append(command)
                command = ""
    return [words for each in found if (words := shlex.split(each, comments=True))]


def problem(words: list[str]) -> str:
    """Says what is wrong with a command, or nothing."""
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
    wrong = {" ".join(words): problem(words) for words in commands(page)}
    assert {command: what for command, what in wrong.items() if what} == {}


def test_commands_are_found_and_judged() -> None:
    readme = [words[:2] for words in commands(ROOT / "README.md")]
    assert ["make", "demo"] in readme and ["pixi", "run"] in readme
    for command in (
        "make nothing",
        "pixi run nothing",
        "kpool nothing",
        "python -m kpool_graph trace --nothing",
        "python examples/nothing.py",
        "nothing at all",
    ):
        assert problem(command.split()), command
