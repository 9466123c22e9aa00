"""What is timed: the cases, all of them and the quick choice."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

HEAD_DIM = 128
POOL_TOPK = 512

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
INT32 = "int32"

TAIL_UPDATE = "tail_update"
COMPRESS = "compress"
RAGGED_UPDATE = "ragged_update"
SEED_TAIL = "seed_tail"
EXPAND_TOPK = "expand_topk"

CLOSING = "tail_update_closing"
OPEN = "tail_update_open"
# One decoded token of one request, against the tokens it already has.
DECODE = "decode_at_context"
# The shortest of those contexts, which the longer ones are compared with.
NEAR_CONTEXT = 1024


@dataclass(frozen=True)
class Case:
    """One batch for one op.

    Attributes:
        name: What is done; the op, or the op and which of its paths.
        op: The op.
        dtype: Of the ring; int32 for `expand_topk`, which has none.
        n: Rows of a decode step, tokens of a ragged batch, or tokens of context.
        requests: Requests in the batch.
        kpool: Tokens per pool.
        next_n: Tokens a decode step appends per row; 0 for ragged ops.
    """

    name: str
    op: str
    dtype: str
    n: int
    requests: int
    kpool: int = 4
    next_n: int = 0

    @property
    def id(self) -> str:
        """What `--only` is matched with."""
        sizes = f"n{self.n}/r{self.requests}/k{self.kpool}/x{self.next_n}"
        return f"{self.name}/{self.dtype}/{sizes}"

    @property
    def is_shared(self) -> bool:
        """Whether it is timed on two threads too."""
        if self.op == COMPRESS:
            return self.n >= 32768
        return self.name == CLOSING and self.n >= 256 and self.kpool == 4

    @property
    def in_graph(self) -> bool:
        """Whether one more op in a graph is timed too.

        A wide step is not: run again, it finds its own later tokens in the ring.
        """
        return self.name in (CLOSING, OPEN) and self.next_n == 1


def _decode(name: str, dtype: str, batch: int, kpool: int = 4, next_n: int = 1) -> Case:
    return Case(name, TAIL_UPDATE, dtype, batch, batch, kpool, next_n)


def _contexts(*contexts: int) -> Iterator[Case]:
    for context in contexts:
        yield Case(DECODE, TAIL_UPDATE, FLOAT32, context, 1, 4, 1)


def all_cases() -> list[Case]:
    """Lists every case.

    Returns:
        The cases, in the order they run.
    """
    cases = []
    for dtype in (FLOAT32, BFLOAT16):
        for name in (CLOSING, OPEN):
            for kpool, next_n in ((4, 1), (4, 4), (16, 1), (16, 4)):
                # Four tokens in a row always end a pool of four.
                if name == CLOSING or next_n < kpool:
                    for batch in (1, 8, 64, 256, 1024):
                        cases.append(_decode(name, dtype, batch, kpool, next_n))
        for op in (COMPRESS, RAGGED_UPDATE, SEED_TAIL):
            for tokens in (1024, 32768, 131072):
                for requests in (1, 16, 256):
                    cases.append(Case(op, op, dtype, tokens, requests))
    for queries in (1, 64, 1024):
        cases.append(Case(EXPAND_TOPK, EXPAND_TOPK, INT32, queries, queries))
    cases += _contexts(NEAR_CONTEXT, 16384, 131072, 1048576)
    return cases


def quick_cases() -> list[Case]:
    """Lists the cases that show every op and both figures in some minutes.

    Returns:
        The cases, in the order they run.
    """
    cases = [_decode(CLOSING, FLOAT32, batch) for batch in (1, 8, 64, 256, 1024)]
    cases += [_decode(CLOSING, BFLOAT16, batch) for batch in (1, 256)]
    cases += [_decode(OPEN, FLOAT32, 256), _decode(OPEN, BFLOAT16, 256)]
    cases.append(_decode(CLOSING, FLOAT32, 64, next_n=4))
    for dtype in (FLOAT32, BFLOAT16):
        cases.append(Case(COMPRESS, COMPRESS, dtype, 32768, 16))
        cases.append(Case(RAGGED_UPDATE, RAGGED_UPDATE, dtype, 32768, 16))
    cases.append(Case(SEED_TAIL, SEED_TAIL, FLOAT32, 32768, 16))
    cases.append(Case(EXPAND_TOPK, EXPAND_TOPK, INT32, 64, 64))
    cases += _contexts(NEAR_CONTEXT, 16384, 131072, 1048576)
    return cases


def choose(quick: bool, threads: int, only: str = "") -> list[Case]:
    """Lists what one process times.

    Args:
        quick: Whether to take the quick choice.
        threads: CPUs of the process; with more than one, the cases that are large
            enough to be shared by threads.
        only: Keep the cases whose id matches: a part of it, or a pattern with `*`.

    Returns:
        The cases, in the order they run.
    """
    cases = quick_cases() if quick else all_cases()
    return [
        case
        for case in cases
        if fnmatch.fnmatch(case.id, f"*{only}*") and (threads == 1 or case.is_shared)
    ]
