"""Every command that a page shows runs, as it is written, in a copy of the tree.

`make test-commands` makes the environments first. What `.ci/run` runs is not run again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from shown import PAGES, ROOT, shown_commands

ENVIRONMENTS = (".venv", ".venv-parity", ".venv-bench", ".venv-serve")
SERVE_PAGE = ROOT / "examples/serve/README.md"
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
        self.sockets = folder / "sockets"
        for made in (self.home, self.temporary, self.sockets):
            made.mkdir()
        self.checkpoint = folder / "kpool_llama"
        self.server_log = folder / "server.log"
        self.server: subprocess.Popen[bytes] | None = None
        self.installed = folder / "venv"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = str(probe.getsockname()[1])
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

    def start(self, command: str, page: Path, **options) -> subprocess.Popen[bytes]:
        if page == SERVE_PAGE:
            command = command.replace("/tmp/kpool_llama", str(self.checkpoint))
            command = command.replace("8000", self.port)
        serves = page == SERVE_PAGE or "serve" in command
        scripts = self.tree / (".venv-serve" if serves else ".venv") / "bin"
        if command.startswith("pip "):
            scripts = self.new_environment(scripts)
        return subprocess.Popen(
            ["sh", "-c", command],
            cwd=self.tree / "build" if command.startswith(CARRIED) else self.tree,
            env=self.variables(command, scripts),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )

    def variables(self, command: str, scripts: Path) -> dict[str, str]:
        ours = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "ARGS")
        kept = {name: os.environ[name] for name in os.environ if name not in ours}
        # MAX leaves its server's sockets behind.
        temporary = self.sockets if command.startswith("max ") else self.temporary
        return kept | {
            "PATH": f"{scripts}:{os.environ['PATH']}",
            "HOME": str(self.home),
            # What is compiled there is no concern of these tests.
            "XDG_CACHE_HOME": str(CACHE),
            "TMPDIR": str(temporary),
        }

    def run(self, command: str, page: Path, status: int = 0) -> str:
        with self.start(
            command, page, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            output = process.communicate()[0].decode()
        print(output)
        assert process.returncode == status
        return output

    def new_environment(self, scripts: Path) -> Path:
        """Makes an environment that has what another one has, and leaves that alone."""
        shutil.rmtree(self.installed, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", self.installed], check=True)
        (below,) = scripts.parent.resolve().glob("lib/python*/site-packages")
        (site,) = self.installed.glob("lib/python*/site-packages")
        (site / "below.pth").write_text(f"{below}\n")
        return self.installed / "bin"

    def serve(self, command: str) -> None:
        """Starts the server and waits until it serves."""
        with self.server_log.open("wb") as log:
            self.server = self.start(
                command, SERVE_PAGE, stdout=log, stderr=subprocess.STDOUT
            )
        health = f"http://127.0.0.1:{self.port}/health"
        deadline = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(health, timeout=5):
                    return
            except OSError:
                ended = self.server.poll() is not None
                if ended or time.monotonic() > deadline:
                    pytest.fail(self.server_log.read_text())
                time.sleep(0.5)

    def leave(self) -> None:
        if self.server is not None and self.server.poll() is None:
            # As Ctrl-C does.
            os.killpg(self.server.pid, signal.SIGINT)
            self.server.wait(60)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    reader = Reader(tmp_path_factory.mktemp("reader"))
    yield reader
    reader.leave()


def answer_in_the_page() -> str:
    (words,) = re.findall(r"`(w\d+(?: w\d+)+)`", SERVE_PAGE.read_text())
    return words


@pytest.mark.parametrize(
    ("command", "page"),
    [pytest.param(*each, id=each[0]) for each in commands_with_their_page().items()],
)
def test_it_runs(command, page, reader):
    if command.startswith("max serve "):
        reader.serve(command)
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
        page = (reader.tree / "build/docs/kpool_graph/serve.html").read_text("utf-8")
        assert 'id="RingLlama"' in page
    if command.startswith("curl "):
        text = json.loads(output)["choices"][0]["text"]
        assert text.split() == answer_in_the_page().split()


def test_only_the_tree_and_the_cache_hold_what_was_made(reader):
    reader.leave()
    left = [path for path in reader.home.rglob("*") if path.is_file()]
    names = [str(path.relative_to(reader.home)) for path in left]
    assert [name for name in names if not name.startswith(OF_OTHERS)] == []
    assert list(reader.temporary.iterdir()) == []
