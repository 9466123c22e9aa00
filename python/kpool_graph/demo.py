"""`kpool demo`: continuous batching over real text, every pool checked."""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Accelerator, Device, accelerator_count
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from ._batching import PADDING, Chunk, Row, schedule
from ._demo_model import KPOOL, VOCABULARY, DemoModel
from ._demo_oracle import Oracle, Request
from ._library import KernelBuildError
from ._shipped import first_with, shipped

Array = npt.NDArray[Any]

# One fewer than the shipped texts: one waits, and takes over another's slot.
MAX_SLOTS = 2


class DemoError(Exception):
    """The demo cannot run as asked."""


def run_demo(texts: Sequence[Path], device_name: str | None) -> int:
    """Serves the texts, checks every pool and ring entry, prints a table.

    Args:
        texts: One request a file; the shipped documents if empty.
        device_name: "cpu" or "gpu"; the first GPU if any when not given.

    Returns:
        0 if everything agrees with the oracle, 1 if something differs, 2 if the
        demo could not run.
    """
    console = Console()
    try:
        requests = [read_request(path) for path in texts or shipped_texts()]
        device = _find_device(device_name)
        console.print(
            f"Compiling the graphs for {device.label}:{device.id}. The first run takes"
            " up to a minute; later runs take seconds, from the cache.",
            highlight=False,
        )
        model = DemoModel(device, MAX_SLOTS)
    except (DemoError, KernelBuildError) as error:
        print(f"kpool demo: {error}", file=sys.stderr)
        return 2
    oracle = Oracle(model.ape)
    _serve(model, requests, oracle, console)
    console.print(_table(requests))
    return _conclude(requests, oracle)


def shipped_texts() -> list[Path]:
    """Finds the documents that ship with the package.

    Returns:
        Their paths, in alphabetical order.

    Raises:
        DemoError: If there are none.
    """
    try:
        folder = first_with("*.txt", shipped("examples/texts"))
    except FileNotFoundError as error:
        raise DemoError(
            f"the demo's texts are missing: {error}. Reinstall the package, or name"
            " files with --text."
        ) from None
    return sorted(folder.glob("*.txt"))


def read_request(path: Path) -> Request:
    """Reads and tokenises a text.

    Args:
        path: A UTF-8 text file.

    Returns:
        The request, nothing of it processed yet.

    Raises:
        DemoError: If the file cannot be read or holds no token.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DemoError(f"cannot read {path}: it is not UTF-8 text") from error
    tokens = re.findall(r"\w+|[^\w\s]", text)
    if not tokens:
        raise DemoError(f"{path} holds no text")
    ids = [zlib.crc32(token.encode()) % VOCABULARY for token in tokens]
    return Request(path.name, np.array(ids, np.int32))


def _find_device(name: str | None) -> Device:
    if name == "cpu" or (name is None and accelerator_count() == 0):
        return CPU()
    if accelerator_count() == 0:
        raise DemoError("no GPU found; use --device cpu")
    return Accelerator()


def _serve(
    model: DemoModel, requests: list[Request], oracle: Oracle, console: Console
) -> None:
    lengths = [len(request.token_ids) for request in requests]
    progress = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        "tokens",
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        task = progress.add_task("", total=sum(lengths))
        for step in schedule(lengths, MAX_SLOTS):
            if step.prefill:
                _prefill(model, requests, step.prefill)
                _check_ring(model, requests, step.slot_owners, oracle)
            if step.decode:
                _decode(model, requests, step.decode, oracle)
                _check_ring(model, requests, step.slot_owners, oracle)
            progress.update(
                task,
                completed=sum(len(request.keys) for request in requests),
                description=f"prefill {len(step.prefill)}, decode {step.decoding}",
            )
        progress.update(task, description="served")


def _prefill(model: DemoModel, requests: list[Request], chunks: list[Chunk]) -> None:
    offsets = np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)])
    start = time.perf_counter()
    k, gate = model.prefill(
        np.concatenate(
            [
                requests[chunk.request].token_ids[chunk.start : chunk.end]
                for chunk in chunks
            ]
        ),
        input_row_offsets=offsets,
        cache_lengths=np.array([chunk.start for chunk in chunks]),
        slot_idx=np.array([chunk.slot for chunk in chunks]),
    )
    seconds = time.perf_counter() - start
    for chunk, first, last in zip(chunks, offsets, offsets[1:], strict=False):
        request = requests[chunk.request]
        request.keys += list(k[first:last])
        request.gates += list(gate[first:last])
        request.seconds += seconds


def _decode(
    model: DemoModel, requests: list[Request], rows: list[Row], oracle: Oracle
) -> None:
    # A padded row's position, -1, picks a token too; the op must not look at it.
    token_ids = [requests[row.request].token_ids[row.position] for row in rows]
    start = time.perf_counter()
    pooled, closed_pool, k, gate = model.decode(
        np.array(token_ids)[:, np.newaxis],
        positions=np.array([[row.position] for row in rows]),
        slot_idx=np.array([row.slot for row in rows]),
    )
    seconds = time.perf_counter() - start
    for index, row in enumerate(rows):
        request = requests[row.request]
        if row.position != PADDING:
            request.keys.append(k[index, 0])
            request.gates.append(gate[index, 0])
            request.seconds += seconds
        oracle.check_row(
            request, row.position, pooled[index, 0], int(closed_pool[index, 0])
        )


def _check_ring(
    model: DemoModel,
    requests: list[Request],
    slot_owners: dict[int, int],
    oracle: Oracle,
) -> None:
    ring = model.ring()
    for slot, request in slot_owners.items():
        oracle.check_ring(ring, requests[request], slot)


def _table(requests: list[Request]) -> Table:
    table = Table(
        caption="Pools in decode were closed and checked here; the others lie in"
        " the prompt. Time is that of the model calls alone."
    )
    table.add_column("request", overflow="fold")
    # Broken by hand, so that the table fits 80 columns.
    for heading in (
        "tokens",
        "pools in\ndecode",
        "pools\nin all",
        "largest\nerror",
        "of\ntolerance",
        "tokens\n/second",
    ):
        table.add_column(heading, justify="right")
    for request in requests:
        tokens = len(request.token_ids)
        table.add_row(
            escape(request.name),
            f"{tokens:,}",
            f"{request.decode_pools:,}",
            f"{tokens // KPOOL:,}",
            f"{request.largest_error:.2g}",
            f"{request.largest_share:.0%}",
            f"{tokens / request.seconds:,.0f}",
        )
    return table


def _conclude(requests: list[Request], oracle: Oracle) -> int:
    rows, entries = oracle.rows, oracle.entries
    if not rows.differing and not entries.differing:
        pools = sum(request.decode_pools for request in requests)
        print(
            f"All {pools:,} pools that decode closed agree with the oracle, and so"
            f" do {entries.checked:,} ring entries, bit for bit."
        )
        return 0
    for tally, kind in ((rows, "decode rows"), (entries, "ring entries")):
        if tally.differing:
            print(
                f"{tally.differing:,} of {tally.checked:,} {kind} differ; the first"
                f" is {tally.first}.",
                file=sys.stderr,
            )
    return 1
