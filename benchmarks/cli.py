"""The command line: a run, its tables, its figures."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kpool_graph.cli import INTERRUPTED

from . import ROOT, machine, plot, providers, rows, run, summary
from .cases import choose
from .providers import NAMES, missing

RESULTS = ROOT / "benchmarks" / "results"
QUICK_RESULTS = ROOT / "build" / "benchmarks"
CSV = "cpu.csv"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments; those of the process if not given.

    Returns:
        The exit status: 0 if all is well, 1 if a provider was wrong or failed, 130
        if it was interrupted.

    Raises:
        SystemExit: If the arguments are wrong, or ask for help.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.call(arguments))
    except KeyboardInterrupt:
        if arguments.call is not _worker:
            print("Interrupted: nothing was written.", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Times the ops beside their peers."
    )
    commands = parser.add_subparsers(required=True)

    runs = commands.add_parser("run", help="verify, time, print tables, draw figures")
    _add_choice(runs)
    runs.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where the CSV and the figures go (default: benchmarks/results, with"
        " --quick build/benchmarks)",
    )
    runs.set_defaults(call=_run)

    ops = commands.add_parser("ops", help="print the tables of a run")
    ops.add_argument("csv", type=Path, nargs="?", default=RESULTS / CSV)
    ops.set_defaults(call=_ops)

    figures = commands.add_parser("plot", help="draw the figures of a run")
    figures.add_argument("csv", type=Path, nargs="?", default=RESULTS / CSV)
    figures.add_argument("--out", type=Path, metavar="DIR", help="default: its folder")
    figures.set_defaults(call=_plot)

    accuracy = commands.add_parser(
        "accuracy", help="print the largest errors of pooled keys by dtype"
    )
    accuracy.set_defaults(call=_accuracy)

    worker = commands.add_parser("worker", help="one process of a run")
    _add_choice(worker)
    worker.add_argument("--threads", type=int, required=True)
    worker.add_argument("--csv", type=Path, help="none: only compile the graphs")
    worker.add_argument("--label", default="", help="the command that rows carry")
    worker.set_defaults(call=_worker)
    return parser


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases, in some minutes"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PATTERN",
        help="cases whose id holds it: `closing`, `compress/bfloat16`, `n256/*/k16`",
    )
    parser.add_argument(
        "--providers",
        type=_providers,
        default=NAMES,
        metavar="A,B",
        help=f"of {', '.join(NAMES)} (default: all)",
    )


def _providers(names: str) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(
                f"providers must be of {', '.join(NAMES)}, got {name}"
            )
    return chosen


def _choice(arguments: argparse.Namespace) -> list[str]:
    options = ["--quick"] if arguments.quick else []
    if arguments.only:
        options += ["--only", arguments.only]
    if tuple(arguments.providers) != NAMES:
        options += ["--providers", ",".join(arguments.providers)]
    return options


def _run(arguments: argparse.Namespace) -> int:
    out = arguments.out or (QUICK_RESULTS if arguments.quick else RESULTS)
    options = _choice(arguments)
    command = " ".join(["python -m benchmarks run", *map(_quoted, options)])
    for provider in arguments.providers:
        if reason := missing(provider):
            print(f"{provider}: not installed ({reason})", file=sys.stderr)
    found: list[rows.Row] = []
    print("Compiling the graphs: some minutes, once.", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # With all CPUs, as the processes that are timed have few to compile on.
        status = _start(["--threads", "0", *options], folder)
        for threads in (1, 2):
            if status or not choose(arguments.quick, threads, arguments.only):
                continue
            csv = Path(folder) / f"{threads}.csv"
            written = ["--threads", str(threads), "--csv", str(csv)]
            status = _start([*written, "--label", command, *options], folder)
            found += rows.read_csv(csv) if csv.is_file() else []
    if not status and _wants_kernels(arguments):
        from kpool_graph import _library

        from . import kernel_level

        try:
            kernels = _library.source_dir()
            found += kernel_level.run(kernels, arguments.quick, command)
        except (RuntimeError, ValueError) as error:
            # What was measured before is not lost.
            print(error, file=sys.stderr)
            status = 1
    rows.write_csv(out / CSV, found)
    print(summary.text(found))
    print(f"wrote {out / CSV}")
    _draw(found, out)
    bad = [row for row in found if row.status in (rows.WRONG, rows.FAILED)]
    for row in bad:
        print(f"{row.provider} is {row.status}: {row.case}", file=sys.stderr)
    return 1 if status or bad else 0


def _quoted(option: str) -> str:
    return f"'{option}'" if set(option) & set("* ,") else option


def _wants_kernels(arguments: argparse.Namespace) -> bool:
    return not arguments.only and rows.OURS in arguments.providers


def _start(options: list[str], folder: str) -> int:
    threads = int(options[options.index("--threads") + 1])
    environment = machine.environment(threads) if threads else dict(os.environ)
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "worker", *options],
        cwd=ROOT,
        # torch.compile leaves headers among the temporary files.
        env={**environment, "TMPDIR": folder},
    ).returncode


def _worker(arguments: argparse.Namespace) -> int:
    threads = arguments.threads
    if threads:
        machine.bind(threads)
    there = [name for name in arguments.providers if not missing(name)]
    quick, only = arguments.quick, arguments.only
    # Every process of a run loads the same module of graphs: the first compiles it.
    graphs_of = choose(quick, 1, only)
    if arguments.csv is None:
        there = [name for name in there if name in providers.GRAPHS]
    prepare = providers.load(there, graphs_of, quick)
    if arguments.csv is None:
        return 0
    cases = choose(quick, threads, only)
    conditions = run.Conditions(threads, quick, arguments.label)
    rows.write_csv(
        arguments.csv, run.run(cases, arguments.providers, prepare, conditions)
    )
    return 0


def _ops(arguments: argparse.Namespace) -> int:
    print(summary.text(rows.read_csv(arguments.csv)), end="")
    return 0


def _accuracy(arguments: argparse.Namespace) -> int:
    # Imports MAX's engine, which a worker loads after it is bound to its CPUs.
    from . import accuracy

    print(accuracy.text(), end="")
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    out = arguments.out or arguments.csv.parent
    return 0 if _draw(rows.read_csv(arguments.csv), out) else 1


def _draw(found: Sequence[rows.Row], out: Path) -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        print("figures not drawn: matplotlib is not installed", file=sys.stderr)
        return False
    for path in plot.draw(found, out):
        print(f"wrote {path}")
    return True
