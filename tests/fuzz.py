"""Random calls of every op, right and wrong ones, and which is which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from max.dtype import DType
from max.graph import BufferType, Graph, Module, TensorType

import kpool_graph
from cases import encode, normal
from models import HOST, Array

Operands = dict[str, Array]
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -3e-39)
U32, I32 = np.uint32, np.int32


@dataclass(frozen=True)
class Fuzzed:
    """An op whose operands' sizes are all unrelated in the graph.

    Attributes:
        op: Its name.
        dtype: Of the ring, keys and gate scores.
        head_dim: Channels per key.
        kpool: Tokens per pool.
        ring_len: Entries per slot.
        width: next_n of tail_update; pool_topk of expand_topk.
        stacked: Rings in one buffer, for copy_slots.
    """

    op: str
    dtype: DType
    head_dim: int
    kpool: int
    ring_len: int = 0
    width: int = 0
    stacked: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        sizes = f"{self.head_dim}_{self.kpool}_{self.ring_len}_{self.width}"
        return f"fuzzed_{self.op}_{self.dtype.name}_{sizes}"

    @property
    def tokens(self) -> bool:
        """Whether keys come by rows of `[next_n]` tokens, not ragged."""
        return self.op == "tail_update"

    def build(self, module: Module) -> None:
        build = getattr(kpool_graph, self.op)
        keywords = {} if self.op == "copy_slots" else {"kpool": self.kpool}
        with Graph(self.name, input_types=self.types(), module=module) as graph:
            outputs = build(*graph.inputs, **keywords)
            if outputs is None:
                graph.output()
            else:
                graph.output(*(outputs if isinstance(outputs, tuple) else (outputs,)))

    def types(self) -> list[BufferType | TensorType]:
        """Lists the graph's inputs; only what a kernel is compiled for is fixed."""
        ring = (*self.stacked, "max_slots", 2, self.ring_len, self.head_dim)
        types: list[BufferType | TensorType] = []
        for name in OPERANDS[self.op]:
            if name == "tail":
                types.append(BufferType(self.dtype, ring, HOST))
                continue
            dtype = {"k": self.dtype, "gate": self.dtype, "ape": DType.float32}.get(
                name, DType.int32 if name in ("positions", "pool_ids") else DType.uint32
            )
            sizes: list[int | str] = [
                f"{name}_{axis}" for axis in range(self.rank(name))
            ]
            if name == "k" and self.tokens:
                sizes[1] = self.width
            if name == "k" and self.op == "compress":
                sizes[1] = self.head_dim
            if name == "pool_ids":
                sizes[1] = self.width
            types.append(TensorType(dtype, sizes, HOST))
        return types

    def rank(self, name: str) -> int:
        """Counts the axes of an operand that is not the ring."""
        if name in ("k", "gate"):
            return 3 if self.tokens else 2
        return 2 if name in ("ape", "positions", "pool_ids") else 1


_RAGGED = ("k", "gate", "ape", "input_row_offsets", "cache_lengths", "slot_idx")
OPERANDS = {
    "seed_tail": ("tail", *(name for name in _RAGGED if name != "ape")),
    "ring_close": ("tail", *_RAGGED),
    "ragged_update": ("tail", *_RAGGED),
    "tail_update": ("tail", "k", "gate", "ape", "positions", "slot_idx"),
    "compress": (*_RAGGED[:4], "pool_row_offsets", "cache_lengths"),
    "expand_topk": ("pool_ids", "input_row_offsets", "cache_lengths"),
    "copy_slots": ("tail", "src_slots", "dst_slots"),
}


def wild(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    """Draws numbers, among them NaN, infinities, zeros and subnormals."""
    drawn = normal(rng, shape, dtype, 2)
    special = rng.random(shape) < rng.choice([0, 0.02, 0.3])
    drawn[special] = rng.choice(encode(SPECIAL, dtype), np.count_nonzero(special))
    return drawn


def draw(rng: np.random.Generator, op: Fuzzed) -> Operands:
    """Draws a call that is right.

    Args:
        rng: Source of everything.
        op: The op.

    Returns:
        Its operands by name, in order.
    """
    max_slots = int(rng.integers(1, 10))
    batch = int(rng.integers(0, min(max_slots, 6) + 1))
    counts = rng.integers(0, 2 * op.kpool + 4, batch)
    if op.tokens:
        counts = rng.integers(0, op.width + 1, batch)
    first = int(rng.choice([0, 0, 0, 2]))
    offsets = first + np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    total = int(offsets[-1]) + int(rng.choice([0, 0, 1, 3]))
    starts = rng.choice([0, 1000, 2**20 - 5, 2**31 - 200]) + rng.integers(0, 99, batch)
    shape = (batch, op.width, op.head_dim) if op.tokens else (total, op.head_dim)
    slots = rng.permutation(max_slots)[:batch].astype(U32)
    # A request that brings nothing may name any slot.
    slots[counts == 0] = rng.choice([0, max_slots, 2**32 - 1])
    pairs = int(rng.integers(0, max_slots + 1))
    sources = max_slots * int(np.prod(op.stacked, dtype=np.int64))
    operands = {
        "tail": lambda: wild(
            rng, (*op.stacked, max_slots, 2, op.ring_len, op.head_dim), op.dtype
        ),
        "k": lambda: wild(rng, shape, op.dtype),
        "gate": lambda: wild(rng, shape, op.dtype),
        "ape": lambda: normal(rng, (op.kpool, op.head_dim), DType.float32),
        "input_row_offsets": lambda: offsets.astype(U32),
        "cache_lengths": lambda: starts.astype(U32),
        "slot_idx": lambda: slots,
        "pool_row_offsets": lambda: whole_pools(op, offsets, starts),
        "positions": lambda: placed(rng, op, counts, starts),
        "pool_ids": lambda: rng.integers(-2, 40, (total, op.width)).astype(I32),
        "src_slots": lambda: rng.integers(0, sources, pairs).astype(U32),
        "dst_slots": lambda: rng.permutation(sources)[:pairs].astype(U32),
    }
    return {name: operands[name]() for name in OPERANDS[op.op]}


def whole_pools(op: Fuzzed, offsets: Array, starts: Array) -> Array:
    """Sums the pools that arrive whole, as `compress` wants them."""
    counts = np.diff(offsets)
    whole = (starts + counts) // op.kpool - -(-starts // op.kpool)
    return np.concatenate([[0], np.cumsum(np.maximum(whole, 0))]).astype(U32)


def placed(rng: np.random.Generator, op: Fuzzed, counts: Array, starts: Array) -> Array:
    """Scatters each row's consecutive positions among padding."""
    positions = rng.integers(-(2**31), 0, (len(counts), op.width)).astype(I32)
    for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
        real = np.sort(rng.permutation(op.width)[:count])
        positions[row, real] = start + np.arange(count)
    return positions


def spoil(rng: np.random.Generator, op: Fuzzed, operands: Operands) -> None:
    """Changes one operand's size or one of its values; not always for the worse."""
    names = [name for name in operands if name != "tail"]
    name = str(rng.choice(names))
    array = operands[name]
    if rng.random() < 0.4:
        fixed = {"k": op.tokens or op.op == "compress", "pool_ids": True}
        axis = int(rng.integers(array.ndim))
        if axis == 1 and fixed.get(name, False):
            axis = 0
        shape = list(array.shape)
        shape[axis] = max(0, shape[axis] + int(rng.choice([-1, 1, 3])))
        operands[name] = (
            np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
        )
        return
    if array.dtype not in (U32, I32) or not array.size:
        return
    at = tuple(int(rng.integers(size)) for size in array.shape)
    near = int(array[at]) + int(rng.choice([-2, -1, 1, 2]))
    other = int(rng.choice(array.ravel()))
    value = int(rng.choice([near, near, other, 9, 2**31 - 1, -1]))
    if name == "cache_lengths":
        # Positions are int32: no request is longer.
        value = abs(value) % (2**31 - 200)
    operands[name] = array.copy()
    operands[name][at] = np.array(value).astype(array.dtype)


def faulty(op: Fuzzed, operands: Operands) -> bool:
    """Says whether a call breaks a rule of the contract."""
    if op.op == "copy_slots":
        src, dst = operands["src_slots"], operands["dst_slots"]
        slots = int(np.prod(operands["tail"].shape[:-3], dtype=np.int64))
        return len(src) != len(dst) or bool(
            (src >= slots).any() or (dst >= slots).any() or len(set(dst)) < len(dst)
        )
    if op.tokens:
        batch = len(operands["slot_idx"])
        wanted = {"positions": (batch, op.width)}
        wanted["k"] = wanted["gate"] = (batch, op.width, op.head_dim)
    else:
        batch = len(operands["cache_lengths"])
        total = len(operands["pool_ids" if op.op == "expand_topk" else "k"])
        wanted = {
            "k": (total, op.head_dim),
            "gate": (total, op.head_dim),
            "input_row_offsets": (batch + 1,),
            "pool_row_offsets": (batch + 1,),
            "slot_idx": (batch,),
        }
    wanted["ape"] = (op.kpool, op.head_dim)
    if any(operands[name].shape != wanted[name] for name in operands.keys() & wanted):
        return True
    if op.tokens:
        rows = [each[each >= 0].astype(np.int64) for each in operands["positions"]]
        counts = np.array([len(row) for row in rows], np.int64)
        if any((np.diff(row) != 1).any() for row in rows):
            return True
    else:
        offsets = operands["input_row_offsets"].astype(np.int64)
        counts = np.diff(offsets)
        if batch and ((counts < 0).any() or offsets[-1] > total):
            return True
    if "pool_row_offsets" in operands:
        sums = whole_pools(op, offsets, operands["cache_lengths"].astype(np.int64))
        return not np.array_equal(sums, operands["pool_row_offsets"])
    if "slot_idx" in operands:
        named = operands["slot_idx"][counts > 0]
        slots = len(operands["tail"])
        return bool((named >= slots).any() or len(set(named.tolist())) < len(named))
    return False
