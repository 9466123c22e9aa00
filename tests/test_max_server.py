"""`MaxServer` ends what it starts, and tells why something does not start."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from kpool_graph.testing import Batch, MaxServer, ServerError

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
# A server that does not end when asked to, and whose worker does not either.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
worker = subprocess.Popen([sys.executable, "-c", sleep + "; time.sleep(600)"])
print("worker", worker.pid, flush=True)
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server whose process is a script of the test's."""

    def make(script: str, **options: float) -> MaxServer:
        made = MaxServer(Path("model"), Path("arch"), log=tmp_path / "log", **options)
        command = [sys.executable, "-c", script.replace("{port}", str(made.port))]
        monkeypatch.setattr(MaxServer, "command", property(lambda self: command))
        return made

    return make


def test_the_command_is_max_serve_of_this_environment_on_this_machine(tmp_path):
    server = MaxServer(Path("m"), Path("a"), "--max-batch-size=8", log=tmp_path / "log")
    max_, *arguments = server.command
    assert Path(max_) == Path(sys.executable).with_name("max")
    assert arguments == [
        "serve",
        "--model-path=m",
        "--custom-architectures=a",
        "--devices=cpu",
        "--host=127.0.0.1",
        f"--port={server.port}",
        "--max-batch-size=8",
    ]


def test_it_serves_inside_the_block_and_not_after_it(server):
    with server(HEALTHY) as running:
        (process,) = psutil.Process().children()
    assert not process.is_running()
    running.stop()


def test_what_it_leaves_in_the_folder_for_temporary_files_is_removed(server):
    leave = "import tempfile; print(tempfile.mkdtemp(), flush=True)\n"
    with server(leave + HEALTHY) as running:
        left = Path(running.tail().splitlines()[0])
        assert left.is_dir()
    assert not left.parent.exists()


def test_nothing_is_left_where_there_is_no_max_to_start(server, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    running = server("")
    monkeypatch.setattr(MaxServer, "command", [str(tmp_path / "max")])
    with pytest.raises(FileNotFoundError), running:
        pass
    assert not list(tmp_path.glob("kpool*"))


def test_an_error_in_the_block_stops_it_too(server):
    with pytest.raises(ZeroDivisionError), server(HEALTHY):
        (process,) = psutil.Process().children()
        raise ZeroDivisionError
    assert not process.is_running()


def test_a_server_that_ends_is_told_with_its_log(server):
    with (
        pytest.raises(ServerError, match=r"ended with status 3:\nno such model"),
        server("print('no such model'); raise SystemExit(3)"),
    ):
        pass


def test_a_server_that_never_serves_is_ended_with_its_workers(server, monkeypatch):
    monkeypatch.setattr("kpool_graph.testing.server._GRACE", 0.5)
    with (
        pytest.raises(ServerError, match=r"does not serve after 3 s") as error,
        server(STUBBORN + "worker.wait()", timeout=3.0),
    ):
        pass
    worker = int(re.search(r"worker (\d+)", str(error.value)).group(1))
    assert_ends(worker)


def test_a_worker_that_outlives_its_server_is_ended(server):
    with server(STUBBORN.replace("SIGTERM, signal.SIG_IGN", "SIGTERM, 0", 1) + HEALTHY):
        (process,) = psutil.Process().children()
        (worker,) = process.children()
        process.send_signal(signal.SIGKILL)
    assert_ends(worker.pid)


def assert_ends(pid: int) -> None:
    """Requires a process to be gone, or a zombie, very soon."""
    for _ in range(50):
        if not psutil.pid_exists(pid):
            return
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} still runs")


def test_its_steps_are_read_from_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO: Executed CE batch with 2 reqs | Terminated: 0 reqs, Pending: 3 reqs |"
        " Input Tokens: 13/13 toks | KVCache usage: 4.5% of 66 blocks (admission\n"
        "INFO: Executed TG batch with 8 reqs | Terminated: 1 reqs, Pending: 0 reqs |"
        " Input Tokens: 8/8192 toks | KVCache usage: 12.0% of 66 blocks (admission\n"
    )
    server = MaxServer(Path("model"), Path("arch"), log=log)
    assert server.batches() == [Batch(2, 13, 4.5), Batch(8, 8, 12.0)]
