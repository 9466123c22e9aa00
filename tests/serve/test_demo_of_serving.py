"""`kpool serve-demo` on the real server: what it prints, and that it cleans up."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

COMMAND = [sys.executable, "-m", "kpool_graph", "serve-demo"]


def test_the_demo_prints_two_checked_answers_and_stops_the_server():
    run = subprocess.run(COMMAND, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    asked_and_answered = [
        line for line in run.stdout.splitlines() if line.startswith("  ")
    ]
    assert asked_and_answered[0] == "  w5 w9 w17 w33 w101"
    assert asked_and_answered[1].startswith("  -> w13 w451 w195 ")
    assert len(asked_and_answered) == 4
    assert "Both answers are those of the NumPy decoder" in run.stdout
    assert no_server_runs()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_server(sent):
    with subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        for line in demo.stdout:
            if line.startswith("Starting it"):
                break
        demo.send_signal(sent)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130, errors
    assert errors.splitlines() == ["Interrupted."]
    assert no_server_runs()


def no_server_runs() -> bool:
    """Whether no process has the demo's checkpoint on its command line."""
    return not any(
        "kpool-serve-" in " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
    )
