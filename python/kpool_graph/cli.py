"""The `kpool` command: its subcommands and their arguments."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from ._versions import MAX_VERSION, __version__

# What a shell reports of a program that Ctrl-C ended.
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments; those of the process if not given.

    Returns:
        The exit status: 0 if all is well, 1 if a check failed, 2 if it could not
        be made, 130 if it was interrupted.

    Raises:
        SystemExit: If the arguments are wrong, or ask for help or the version.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A bar or a file's name that the encoding lacks must not end the run.
            stream.reconfigure(errors="replace")
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kpool", description="The k-pool tail ring for MAX graphs."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"kpool_graph {__version__} (for MAX {MAX_VERSION})",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="continuous batching over real text, every pool checked",
        description="Serves text files as requests: they arrive at different"
        " steps, prefill in chunks, decode together and share ring slots. Every"
        " pool and every live ring entry is compared with NumPy.",
    )
    demo.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="one request a file, UTF-8 (default: three documents that ship with"
        " the package)",
    )
    demo.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="where the graphs run (default: the first GPU, or the CPU if there"
        " is none)",
    )

    commands.add_parser(
        "serve-demo",
        help="a k-pooled model on max serve, its answers checked",
        description="Makes a tiny random checkpoint, serves it with max serve on"
        " 127.0.0.1, asks two prompts, and compares the answers with NumPy. Needs"
        " the extra: pip install 'kpool-graph[serve]'.",
    )

    commands.add_parser(
        "doctor",
        help="check the installation and say what to do about it",
        description="Checks versions, devices, kernels and ops, and runs both ops"
        " once.",
    )

    trace = commands.add_parser(
        "trace",
        help="show what the ring holds, step by step, and what a rejection costs",
        description="Decodes one request on a plain ring (ring_len = kpool) and on a"
        " wide one: which entry each token takes, which pool closes, and what the"
        " rejected tokens of a step overwrite.",
    )
    sizes = (
        ("kpool", 4, "tokens per pool"),
        ("next-n", 3, "tokens a step appends"),
        ("reject", 2, "how many of them, the last ones, each step rejects"),
        ("steps", 6, "steps to take"),
    )
    for name, default, what in sizes:
        trace.add_argument(
            f"--{name}", type=int, default=default, help=f"{what} (default: {default})"
        )
    trace.add_argument(
        "--ring-len",
        type=int,
        help="entries of the wide ring (default: as many as make any rejection safe)",
    )
    trace.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the same to this file"
    )

    return parser


def _run(args: argparse.Namespace) -> int:
    # Imported late: they need MAX, and `kpool doctor` must start without it.
    if args.command == "demo":
        from .demo import run_demo

        return run_demo(args.text, args.device)
    if args.command == "serve-demo":
        from .serve_demo import run_serve_demo

        return run_serve_demo()
    if args.command == "trace":
        from .trace import run_trace

        return run_trace(
            kpool=args.kpool,
            next_n=args.next_n,
            reject=args.reject,
            ring_len=args.ring_len,
            steps=args.steps,
            svg=args.svg,
        )
    from .doctor import run_doctor

    return run_doctor()
