"""`kpool serve-demo`: a k-pooled model on a real `max serve`, checked against NumPy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ._library import KernelBuildError, kernels_path
from ._shipped import first_with, shipped
from .testing import MaxServer, Prompt, ReferenceDecoder, ServerError

_MAX_TOKENS = 16
# Pools of four: the first prompt leaves one member waiting, the second three.
_PROMPTS = (
    Prompt((5, 9, 17, 33, 101), _MAX_TOKENS),
    Prompt(tuple(range(7, 500, 9)), _MAX_TOKENS),
)


class ServeDemoError(Exception):
    """The demo cannot run."""


def run_serve_demo() -> int:
    """Makes a checkpoint, serves it, asks it two prompts, and stops the server.

    Returns:
        0 if the answers are those of the NumPy decoder, 1 if one is not, 2 if the demo
        could not run.

    Raises:
        KeyboardInterrupt: If it is interrupted or terminated; the server is stopped.
    """
    # Terminated, Python would leave the server running.
    previous = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        with tempfile.TemporaryDirectory(prefix="kpool-serve-") as folder:
            return _serve(Path(folder))
    except (ServeDemoError, KernelBuildError, ServerError) as error:
        print(f"kpool serve-demo: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)


def example_folder() -> Path:
    """Finds examples/serve, which ships with the package.

    Returns:
        The folder with `kpool_llama` and `make_checkpoint.py`.

    Raises:
        ServeDemoError: If it is missing.
    """
    try:
        return first_with("make_checkpoint.py", shipped("examples/serve"))
    except FileNotFoundError as error:
        raise ServeDemoError(
            f"the model to serve is missing: {error}. Reinstall the package."
        ) from None


def _serve(folder: Path) -> int:
    try:
        from . import serve  # noqa: F401
    except ImportError as error:
        raise ServeDemoError(str(error)) from error
    checkpoint = folder / "checkpoint"
    example = example_folder()
    _say("Making a tiny checkpoint with random weights.")
    _make_checkpoint(example / "make_checkpoint.py", checkpoint)
    kernels_path()

    server = MaxServer(
        checkpoint,
        example / "kpool_llama",
        "--max-batch-size=8",
        log=folder / "server.log",
    )
    _say(f"$ {' '.join(server.command)}")
    _say("Starting it. MAX compiles the model first: some minutes once, then from its")
    _say("cache in less than one.")
    with server:
        _say(f"It serves on port {server.port}. Asking two prompts at once.")
        answers = server.client.complete_all(_PROMPTS, at_once=len(_PROMPTS))
        _say("Stopping it.")
    reference = ReferenceDecoder.load(checkpoint)
    differing = 0
    for prompt, answer in zip(_PROMPTS, answers, strict=True):
        assert answer is not None, "no prompt of the demo is cancelled"
        wanted = reference.answer(prompt.tokens, prompt.max_tokens).tokens
        _say(f"\n  {_words(prompt.tokens)}\n  -> {_words(answer.tokens)}")
        if answer.tokens != wanted:
            differing += 1
            print(f"NumPy says: {_words(wanted)}", file=sys.stderr)
    if differing:
        print(f"\n{differing} of {len(_PROMPTS)} answers differ.", file=sys.stderr)
        return 1
    _say("\nBoth answers are those of the NumPy decoder, word for word.")
    return 0


def _make_checkpoint(script: Path, checkpoint: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(script), str(checkpoint)],
        # Importing max.nn sets variables behind os.environ's back, with which a child
        # is another Python.
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        raise ServeDemoError(f"{script} failed:\n{run.stderr}")


def _words(tokens: tuple[int, ...] | list[int]) -> str:
    words = [f"w{token}" for token in tokens]
    if len(words) > _MAX_TOKENS:
        words[_MAX_TOKENS // 2 : -_MAX_TOKENS // 2] = ["..."]
    return " ".join(words)


def _say(text: str) -> None:
    print(text, flush=True)
