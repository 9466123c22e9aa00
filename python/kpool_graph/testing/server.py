"""Runs `max serve` for as long as a test or a demo needs it."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .completions import Client

_POLL = 0.25
_GRACE = 20.0
_LOG_LINES = 60
_BATCH = re.compile(
    r"Executed \w+ batch with (\d+) reqs.*Input Tokens: (\d+)/"
    r".*KVCache usage: ([\d.]+)%"
)


class ServerError(RuntimeError):
    """The server did not come up; the message ends with its log."""


@dataclass(frozen=True)
class Batch:
    """One step of the server.

    Attributes:
        requests: Requests in the step.
        tokens: Their new tokens.
        memory: Percent of the cache memory that requests hold, one decimal.
    """

    requests: int
    tokens: int
    memory: float


class MaxServer:
    """A `max serve` process on 127.0.0.1, started and stopped by a `with` block.

    Attributes:
        port: Its port.
        log: The file that holds what it printed.
    """

    def __init__(
        self,
        checkpoint: Path,
        architecture: Path | str,
        *options: str,
        log: Path,
        timeout: float = 1200.0,
    ) -> None:
        """Says what to serve; nothing is started.

        Args:
            checkpoint: The model's folder.
            architecture: The architecture's package, or `FOLDER:MODULE`.
            *options: More options of `max serve`.
            log: File for what it prints.
            timeout: Seconds to wait until it serves; a first run compiles for minutes.
        """
        self.port = _free_port()
        self.log = log
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._options = options
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    @property
    def command(self) -> list[str]:
        """The command line, as the process has it."""
        return [
            # Beside this interpreter, whatever PATH says.
            str(Path(sys.executable).with_name("max")),
            "serve",
            f"--model-path={self._checkpoint}",
            f"--custom-architectures={self._architecture}",
            "--devices=cpu",
            "--host=127.0.0.1",
            f"--port={self.port}",
            *self._options,
        ]

    @property
    def client(self) -> Client:
        """Asks this server."""
        return Client(self.port, str(self._checkpoint))

    def __enter__(self) -> MaxServer:
        """Starts the server and waits until it serves.

        Returns:
            Itself.

        Raises:
            ServerError: If it ends, or does not serve in time.
        """
        # MAX leaves its sockets behind. Their paths must be short.
        self._sockets = tempfile.TemporaryDirectory(
            prefix="kpool", ignore_cleanup_errors=True
        )
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**self._environment(), "TMPDIR": self._sockets.name},
                    # Its workers are in its group, so that they can be ended with it.
                    start_new_session=True,
                )
            self._wait_until_it_serves(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the server.

        Args:
            kind: See the `with` statement.
            error: Likewise.
            traceback: Likewise.
        """
        self.stop()

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "MAX_SERVE_DISABLE_TELEMETRY": "1",
            "MAX_SERVE_METRICS_ENDPOINT_PORT": str(_free_port()),
            # Every step is logged, for `batches`.
            "MAX_SERVE_SCHEDULER_STATS_LOG_INTERVAL_S": "0",
        }

    def _wait_until_it_serves(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._is_healthy():
            if process.poll() is not None:
                raise ServerError(
                    f"max serve ended with status {process.returncode}:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"max serve does not serve after {self._timeout:.0f} s:\n"
                    + self.tail()
                )
            time.sleep(_POLL)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """Ends the server and its workers, and waits for them."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
        if self._sockets is not None:
            self._sockets.cleanup()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        # What is left: workers whose server died, or all of a server that hangs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def tail(self) -> str:
        """Returns the end of what the server printed."""
        return "\n".join(self._printed().splitlines()[-_LOG_LINES:])

    def batches(self) -> list[Batch]:
        """Lists the server's steps so far, as it logged them."""
        return [
            Batch(int(requests), int(tokens), float(memory))
            for requests, tokens, memory in _BATCH.findall(self._printed())
        ]

    def _printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
