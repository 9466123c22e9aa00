"""Every command that a page shows runs, as it is written, in a copy of the tree.

`make test-commands` makes the environments first. What `.ci/run` runs is not run again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kpool_graph.testing import MaxServer
from shown import PAGES, ROOT, shown_commands

ENVIRONMENTS = (".venv", ".venv-parity", ".venv-bench", ".venv-serve")
SERVE_PAGE = ROOT / "examples/serve/README.md"
KPOOL_LLAMA = "examples/serve/kpool_llama"
# Every case takes half an hour; what is left still goes through all that a run does.
NARROWED = {
    "make bench": " ARGS='--only closing/float32/n8/ --providers kpool_graph,numpy'"
}
(TARGETS,) = re.findall(
    r"^for target in (.*); do$", (ROOT / ".ci/run").read_text(), re.M
)
RUN_BY_CI = {f"make {target}" for target in TARGETS.split()}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
# MAX numbers an installation, and pip asks a Rust that may be there for its version,
# which then writes settings of its own.
OF_OTHERS = (".local/share/modular", ".local/state/modular", ".rustup")
# The page has its archive carried to a machine with a GPU first.
CARRIED = ("tar ", "kpool-gpu-bench/run")


def commands_with_their_page() -> dict[str, Path]:
    """Lists what is run: pixi's tasks are make's targets, and once is enough."""
    found: dict[str, Path] = {}
    for page in PAGES:
        for command in shown_commands(page):
            found.setdefault(command.replace("pixi run ", "make "), page)
    return {command: found[command] for command in found if command not in RUN_BY_CI}


class Reader:
    """Somebody who has a copy of the tree and types what the pages say."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "kpool_graph"
        self.home = folder / "home"
        self.temporary = folder / "tmp"
        self.home.mkdir()
        self.temporary.mkdir()
        self.checkpoint = folder / "kpool_llama"
        self.server = ShownServer(self, folder / "server.log")
        self.installed = folder / "venv"
        tracked = subprocess.run(
            ["git", "ls-files", "-z"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in tracked.split("\0")[:-1]:
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            # With its time, or make would install again.
            shutil.copy2(ROOT / name, self.tree / name)
        for environment in ENVIRONMENTS:
            assert (ROOT / environment / ".installed").exists(), "make test-commands"
            (self.tree / environment).symlink_to(ROOT / environment)

    def typed(self, command: str, page: Path) -> str:
        """The command, with what may be taken on this machine replaced."""
        if page != SERVE_PAGE:
            return command
        command = command.replace("/tmp/kpool_llama", str(self.checkpoint))
        return command.replace("8000", str(self.server.port))

    def scripts(self, command: str, page: Path) -> Path:
        """The programs of the environment that the page has its reader make."""
        serves = page == SERVE_PAGE or "serve" in command
        scripts = self.tree / (".venv-serve" if serves else ".venv") / "bin"
        return self.new_environment(scripts) if command.startswith("pip ") else scripts

    def variables(self, scripts: Path) -> dict[str, str]:
        ours = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "ARGS")
        return {name: os.environ[name] for name in os.environ if name not in ours} | {
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "HOME": str(self.home),
            # What is compiled there is no concern of these tests.
            "XDG_CACHE_HOME": str(CACHE),
            "TMPDIR": str(self.temporary),
        }

    def run(self, command: str, page: Path, status: int = 0) -> str:
        done = subprocess.run(
            ["sh", "-c", self.typed(command, page)],
            cwd=self.tree / "build" if command.startswith(CARRIED) else self.tree,
            env=self.variables(self.scripts(command, page)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        print(done.stdout)
        assert done.returncode == status
        return done.stdout

    def new_environment(self, scripts: Path) -> Path:
        """Makes an environment that has what another one has, and leaves that alone."""
        shutil.rmtree(self.installed, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.installed], check=True)
        (below,) = scripts.parent.resolve().glob("lib/python*/site-packages")
        (site,) = self.installed.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(f"{below}\n")
        return self.installed / "bin"


class ShownServer(MaxServer):
    """The page's own command, in its reader's environment."""

    def __init__(self, reader: Reader, log: Path) -> None:
        super().__init__(reader.checkpoint, KPOOL_LLAMA, log=log)
        self.reader = reader
        self.shown = ""

    @property
    def command(self) -> list[str]:
        return ["sh", "-c", f"cd {self.reader.tree}; exec {self.shown}"]

    def _environment(self) -> dict[str, str]:
        return self.reader.variables(self.reader.scripts(self.shown, SERVE_PAGE))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    reader = Reader(tmp_path_factory.mktemp("reader"))
    yield reader
    reader.server.stop()


def answer_in_the_page() -> str:
    (words,) = re.findall(r"`(w\d+(?: w\d+)+)`", SERVE_PAGE.read_text())
    return words


@pytest.mark.parametrize(
    ("command", "page"),
    [pytest.param(*each, id=each[0]) for each in commands_with_their_page().items()],
)
def test_it_runs(command, page, reader):
    if command.startswith("max serve "):
        reader.server.shown = reader.typed(command, page)
        reader.server.__enter__()
        return
    output = reader.run(
        command + NARROWED.get(command, ""),
        page,
        # There is no GPU that it could time.
        status=1 if command.startswith("kpool-gpu-bench/run") else 0,
    )
    if command.startswith("pip "):
        where = "import kpool_graph; print(kpool_graph.__file__)"
        python = reader.installed / "bin/python"
        found = subprocess.check_output([python, "-I", "-c", where], text=True)
        assert Path(found).is_relative_to(reader.installed)
    if command == "make docs":
        reference = reader.tree / "build/docs/kpool_graph/serve.html"
        assert 'id="RingLlama"' in reference.read_text("utf-8")
    if command.startswith("curl "):
        text = json.loads(output)["choices"][0]["text"]
        assert text.split() == answer_in_the_page().split()


def test_only_the_tree_and_the_cache_hold_what_was_made(reader):
    reader.server.stop()
    left = [path for path in reader.home.rglob("*") if path.is_file()]
    names = [str(path.relative_to(reader.home)) for path in left]
    assert [name for name in names if not name.startswith(OF_OTHERS)] == []
    assert list(reader.temporary.iterdir()) == []
