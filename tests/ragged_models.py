"""The ragged ops' graphs, and batches for them; conventions as in `models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from max.dtype import DType
from max.graph import BufferType, Graph, Module, TensorType

import kpool_graph
from cases import FAMILIES, SEED_TAILS, ape_for, normal, seed_operands
from models import HOST, STORAGE, Array, SeedTail, TailUpdate, declare

OFFSETS = TensorType(DType.uint32, ("batch_plus_1",), HOST)
REQUESTS = TensorType(DType.uint32, ("batch",), HOST)


@dataclass(frozen=True)
class RaggedOp(SeedTail):
    """A graph over a ring that takes seed_tail's operands, and ape after gate."""

    stem: ClassVar[str]

    @property
    def name(self) -> str:
        return super().name.replace("seed_tail", self.stem)

    @property
    def input_types(self) -> list[BufferType | TensorType]:
        ape = TensorType(DType.float32, (self.kpool, self.head_dim), HOST)
        ring, k, gate, *tables = super().input_types
        return [ring, k, gate, ape, *tables]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            graph.output(*self.body(*graph.inputs))

    def body(self, *operands: Any) -> Sequence[Any]:
        return getattr(kpool_graph, self.stem)(*operands, kpool=self.kpool)


@dataclass(frozen=True)
class RingClose(RaggedOp):
    """A graph of one `ring_close`."""

    stem = "ring_close"


@dataclass(frozen=True)
class RaggedUpdate(RaggedOp):
    """A graph of one `ragged_update`."""

    stem = "ragged_update"


@dataclass(frozen=True)
class ThreeOps(RaggedOp):
    """`ring_close`, `compress` and `seed_tail` in one graph.

    Its outputs are pooled and closed_pool of ring_close, pooled of compress, and
    pool_row_offsets.
    """

    stem = "three_ops"

    @property
    def builders(self) -> Any:
        return kpool_graph.ring_close, kpool_graph.compress, kpool_graph.seed_tail

    def body(self, *operands: Any) -> Sequence[Any]:
        tail, k, gate, ape, offsets, lengths, slots = operands
        ring_close, compress, seed_tail = self.builders
        kpool = self.kpool
        rows = kpool_graph.pool_row_offsets(lengths, offsets, kpool)
        closed = ring_close(*operands, kpool=kpool)
        whole = compress(k, gate, ape, offsets, rows, lengths, kpool=kpool)
        seed_tail(tail, k, gate, offsets, lengths, slots, kpool=kpool)
        return [*closed, whole, rows]


@dataclass(frozen=True)
class Compress:
    """A graph of one `compress`."""

    dtype: DType
    head_dim: int
    kpool: int

    @property
    def name(self) -> str:
        return f"compress_{self.dtype.name}_h{self.head_dim}_k{self.kpool}"

    @property
    def input_types(self) -> list[TensorType]:
        tokens = TensorType(self.dtype, ("total_tokens", self.head_dim), HOST)
        ape = TensorType(DType.float32, (self.kpool, self.head_dim), HOST)
        return [tokens, tokens, ape, OFFSETS, OFFSETS, REQUESTS]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            graph.output(kpool_graph.compress(*graph.inputs, kpool=self.kpool))


@dataclass(frozen=True)
class ExpandTopk:
    """A graph of one `expand_topk`."""

    kpool: int
    pool_topk: int
    always_select_tail: bool

    @property
    def name(self) -> str:
        tail = "tail" if self.always_select_tail else "no_tail"
        return f"expand_topk_k{self.kpool}_t{self.pool_topk}_{tail}"

    @property
    def columns(self) -> int:
        tail = self.kpool - 1 if self.always_select_tail else 0
        return self.pool_topk * self.kpool + tail

    @property
    def input_types(self) -> list[TensorType]:
        ids = TensorType(DType.int32, ("total_tokens", self.pool_topk), HOST)
        return [ids, OFFSETS, REQUESTS]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            graph.output(self.body(*graph.inputs))

    def body(self, *operands: Any) -> Any:
        return kpool_graph.expand_topk(
            *operands, kpool=self.kpool, always_select_tail=self.always_select_tail
        )


@dataclass(frozen=True)
class PoolRowOffsets:
    """A graph of `pool_row_offsets` alone."""

    kpool: int

    @property
    def name(self) -> str:
        return f"pool_row_offsets_k{self.kpool}"

    def build(self, module: Module) -> None:
        types = [REQUESTS, OFFSETS]
        with Graph(self.name, input_types=types, module=module) as graph:
            graph.output(kpool_graph.pool_row_offsets(*graph.inputs, self.kpool))


def on_ring(kind: type[RaggedOp], op: SeedTail) -> Any:
    """Declares an op on the ring of another."""
    return declare(kind(op.dtype, op.head_dim, op.kpool, op.ring_len))


def on_keys(op: SeedTail) -> Compress:
    """Declares compress for the keys of another op."""
    return declare(Compress(op.dtype, op.head_dim, op.kpool))


@dataclass(frozen=True)
class RaggedFamily:
    """Ops that share a ring, and every way through them."""

    decode: TailUpdate
    wide: TailUpdate
    seed_tail: SeedTail
    compress: Compress
    three_ops: ThreeOps
    ragged_update: RaggedUpdate


RAGGED_FAMILIES = tuple(
    RaggedFamily(
        family.decode,
        family.wide,
        family.seed_tail,
        on_keys(family.seed_tail),
        on_ring(ThreeOps, family.seed_tail),
        on_ring(RaggedUpdate, family.seed_tail),
    )
    for family in FAMILIES
)
RING_CLOSES = tuple(on_ring(RingClose, op) for op in SEED_TAILS)
RAGGED_UPDATES = tuple(on_ring(RaggedUpdate, op) for op in SEED_TAILS)

# GLM-5.3-Flash.
GLM = SeedTail(DType.bfloat16, 128, 4, 4)
# kpool 4 in each dtype; head_dim 8 is below the SIMD width of a 16-bit dtype.
IN_EACH_DTYPE = (
    SeedTail(DType.float32, 8, 4, 4),
    SeedTail(DType.float16, 8, 4, 7),
    GLM,
)
COMPRESSES = (
    *(family.compress for family in RAGGED_FAMILIES),
    declare(Compress(DType.float16, 8, 4)),
    on_keys(GLM),
    declare(Compress(DType.float32, 128, 16)),
)
EXPAND_TOPKS = tuple(
    declare(ExpandTopk(kpool, pool_topk, always_select_tail))
    for kpool, pool_topk, always_select_tail in (
        (1, 5, True),
        (2, 3, False),
        (3, 4, True),
        (4, 512, True),
        (4, 512, False),
        (16, 2, True),
    )
)


@dataclass(frozen=True)
class Request:
    """A request's slot and its tokens, the first of which stands at `start`."""

    slot: int
    start: int
    k: Array
    gate: Array

    @property
    def end(self) -> int:
        return self.start + len(self.k)


def draw_request(
    rng: np.random.Generator, op: Any, slot: int, start: int, tokens: int
) -> Request:
    """Draws a request's tokens."""
    shape = (tokens, op.head_dim)
    return Request(
        slot, start, normal(rng, shape, op.dtype), normal(rng, shape, op.dtype, 2)
    )


def ragged_batch(op: Any, parts: Sequence[tuple[Request, int, int]]) -> list[Array]:
    """Builds the operands of a call that brings some tokens of some requests.

    Args:
        op: The op.
        parts: For each row of the batch, a request, how many of its tokens came
            before, and how many come now.

    Returns:
        k, gate, input_row_offsets, cache_lengths, slot_idx.
    """
    none = np.zeros((0, op.head_dim), STORAGE[op.dtype])
    return [
        np.concatenate([none, *(each.k[at : at + n] for each, at, n in parts)]),
        np.concatenate([none, *(each.gate[at : at + n] for each, at, n in parts)]),
        np.cumsum([0, *(n for _, _, n in parts)]).astype(np.uint32),
        np.array([each.start + at for each, at, _ in parts], np.uint32),
        np.array([each.slot for each, _, _ in parts], np.uint32),
    ]


def ragged_operands(
    rng: np.random.Generator, op: Any, requests: Sequence[tuple[int, int, int]]
) -> list[Array]:
    """Draws the operands of an op that takes seed_tail's and ape.

    Args:
        rng: Source of values.
        op: The op.
        requests: (slot, cached tokens, new tokens) of each.

    Returns:
        k, gate, ape, input_row_offsets, cache_lengths, slot_idx.
    """
    k, gate, *tables = seed_operands(rng, op, requests)
    return [k, gate, ape_for(rng, op), *tables]


def row_tables(*requests: tuple[int, int, int]) -> list[Array]:
    """Lists the row tables of a batch.

    Args:
        *requests: (slot, cached tokens, new tokens) of each.

    Returns:
        input_row_offsets, cache_lengths, slot_idx.
    """
    slots, lengths, counts = np.array(requests, np.int64).reshape(-1, 3).T
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return [each.astype(np.uint32) for each in (offsets, lengths, slots)]


def every_phase(kpool: int) -> list[tuple[int, int, int]]:
    """Lists a request for each alignment and each count that may matter.

    Args:
        kpool: Tokens per pool.

    Returns:
        (slot, cached tokens, new tokens) of each; the slots fall.
    """
    pairs = []
    for phase in range(kpool):
        left = kpool - phase
        counts = {0, 1, left - 1, left, left + 1, left + kpool, 3 * kpool - 1}
        pairs += [(5 * kpool + phase, count) for count in sorted(counts)]
    return [(len(pairs) - 1 - row, *pair) for row, pair in enumerate(pairs)]


def eighths(count: int) -> list[tuple[int, int]]:
    """Cuts `count` requests into eight runs of them, as (first, last + 1)."""
    bounds = [count * part // 8 for part in range(9)]
    return list(pairwise(bounds))


def random_requests(
    rng: np.random.Generator, rows: int, longest: int
) -> list[tuple[int, int, int]]:
    """Draws requests with slots of their own, in a ring of `rows + 3` slots.

    Args:
        rng: Source of values.
        rows: Requests.
        longest: The most tokens that one brings.

    Returns:
        (slot, cached tokens, new tokens) of each.
    """
    slots = rng.permutation(rows + 3)[:rows]
    starts = rng.integers(0, 2**20, rows)
    counts = rng.integers(0, longest + 1, rows)
    return [tuple(map(int, each)) for each in zip(slots, starts, counts, strict=True)]
