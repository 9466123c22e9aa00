"""A ragged batch that the ops run on, by CPU tasks or by GPU threads."""

from std.random import random_si64
from std.testing import assert_equal

from kernels.compress import Compress
from kernels.launch import KernelCall, run_cpu
from kernels.ragged_update import RaggedUpdate
from kernels.ring_close import RingClose
from kernels.seed_tail import SeedTail
from layout import TileTensor, row_major
from schedule import (
    SPARE_SLOTS,
    distinct_slots,
    grids,
    noise,
    poisoned,
    run_threads,
)

comptime MAX_REQUESTS = 9


struct RaggedCase[dtype: DType, head_dim: Int, kpool: Int, ring_len: Int]:
    """Random operands of the ragged ops, and what a call leaves."""

    comptime Seed = SeedTail[
        Self.dtype, Self.head_dim, Self.kpool, Self.ring_len
    ]
    comptime Close = RingClose[
        Self.dtype, Self.head_dim, Self.kpool, Self.ring_len
    ]
    comptime Update = RaggedUpdate[
        Self.dtype, Self.head_dim, Self.kpool, Self.ring_len
    ]
    comptime Whole = Compress[Self.dtype, Self.head_dim, Self.kpool]

    var requests: Int
    var initial: List[Scalar[Self.dtype]]
    var tail: List[Scalar[Self.dtype]]
    var pooled: List[Scalar[Self.dtype]]
    var closed_pool: List[Int32]
    var k: List[Scalar[Self.dtype]]
    var gate: List[Scalar[Self.dtype]]
    var ape: List[Float32]
    var input_row_offsets: List[UInt32]
    var pool_row_offsets: List[UInt32]
    var cache_lengths: List[UInt32]
    var slot_idx: List[UInt32]

    def __init__(out self, requests: Int):
        comptime SLOT = 2 * Self.ring_len * Self.head_dim
        self.requests = requests
        self.initial = noise[Self.dtype]((requests + SPARE_SLOTS) * SLOT)
        self.tail = self.initial.copy()
        self.ape = noise[DType.float32](Self.kpool * Self.head_dim)
        self.slot_idx = distinct_slots(requests)
        self.input_row_offsets = [UInt32(0)]
        self.pool_row_offsets = [UInt32(0)]
        self.cache_lengths = List[UInt32](capacity=requests)
        var tokens = 0
        var pools = 0
        for _ in range(requests):
            var count = Int(random_si64(0, 3 * Int64(Self.kpool)))
            var start = Int(random_si64(0, 40))
            tokens += count
            pools += max(
                (start + count) // Self.kpool
                - (start + Self.kpool - 1) // Self.kpool,
                0,
            )
            self.cache_lengths.append(UInt32(start))
            self.input_row_offsets.append(UInt32(tokens))
            self.pool_row_offsets.append(UInt32(pools))
        self.k = noise[Self.dtype](tokens * Self.head_dim)
        self.gate = noise[Self.dtype](tokens * Self.head_dim)
        var rows = max(
            requests, (tokens + requests * (Self.kpool - 1)) // Self.kpool
        )
        self.pooled = poisoned[Self.dtype](rows * Self.head_dim)
        self.closed_pool = poisoned[DType.int32](rows)

    def reset(mut self):
        self.tail = self.initial.copy()
        self.pooled = poisoned[Self.dtype](len(self.pooled))
        self.closed_pool = poisoned[DType.int32](len(self.closed_pool))

    def total_tokens(self) -> Int:
        return len(self.k) // Self.head_dim

    def seed_tail(mut self) -> Self.Seed:
        self.reset()
        return Self.Seed(
            TileTensor(
                Span(self.tail),
                row_major(
                    self.requests + SPARE_SLOTS,
                    2,
                    Self.ring_len,
                    Self.head_dim,
                ),
            ),
            TileTensor(
                self.k, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(
                self.gate, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(
                self.input_row_offsets, row_major(self.requests + 1)
            ).as_imm(),
            TileTensor(self.cache_lengths, row_major(self.requests)).as_imm(),
            TileTensor(self.slot_idx, row_major(self.requests)).as_imm(),
            self.requests,
        )

    def compress(mut self) -> Self.Whole:
        self.reset()
        return Self.Whole(
            TileTensor(
                Span(self.pooled),
                row_major(self.total_tokens() // Self.kpool, Self.head_dim),
            ),
            TileTensor(
                self.k, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(
                self.gate, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(self.ape, row_major(Self.kpool, Self.head_dim)).as_imm(),
            TileTensor(
                self.input_row_offsets, row_major(self.requests + 1)
            ).as_imm(),
            TileTensor(
                self.pool_row_offsets, row_major(self.requests + 1)
            ).as_imm(),
            TileTensor(self.cache_lengths, row_major(self.requests)).as_imm(),
            self.requests,
        )

    def ring_close(mut self) -> Self.Close:
        self.reset()
        return Self.Close(
            TileTensor(
                Span(self.pooled), row_major(self.requests, Self.head_dim)
            ),
            TileTensor(Span(self.closed_pool), row_major(self.requests)),
            TileTensor(
                Span(self.tail),
                row_major(
                    self.requests + SPARE_SLOTS,
                    2,
                    Self.ring_len,
                    Self.head_dim,
                ),
            ),
            TileTensor(
                self.k, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(
                self.gate, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(self.ape, row_major(Self.kpool, Self.head_dim)).as_imm(),
            TileTensor(
                self.input_row_offsets, row_major(self.requests + 1)
            ).as_imm(),
            TileTensor(self.cache_lengths, row_major(self.requests)).as_imm(),
            TileTensor(self.slot_idx, row_major(self.requests)).as_imm(),
            self.requests,
        )

    def ragged_update(mut self) -> Self.Update:
        self.reset()
        var rows = (
            self.total_tokens() + self.requests * (Self.kpool - 1)
        ) // Self.kpool
        return Self.Update(
            TileTensor(Span(self.pooled), row_major(rows, Self.head_dim)),
            TileTensor(Span(self.closed_pool), row_major(rows)),
            TileTensor(
                Span(self.tail),
                row_major(
                    self.requests + SPARE_SLOTS,
                    2,
                    Self.ring_len,
                    Self.head_dim,
                ),
            ),
            TileTensor(
                self.k, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(
                self.gate, row_major(self.total_tokens(), Self.head_dim)
            ).as_imm(),
            TileTensor(self.ape, row_major(Self.kpool, Self.head_dim)).as_imm(),
            TileTensor(
                self.input_row_offsets, row_major(self.requests + 1)
            ).as_imm(),
            TileTensor(self.cache_lengths, row_major(self.requests)).as_imm(),
            TileTensor(self.slot_idx, row_major(self.requests)).as_imm(),
            self.requests,
        )

    def run[op: StaticString](mut self, threads: Int) raises:
        """Runs an op on `threads` GPU threads, or on the CPU if that is 0."""
        comptime if op == "seed_tail":
            run_either(self.seed_tail(), threads)
        elif op == "compress":
            run_either(self.compress(), threads)
        elif op == "ring_close":
            run_either(self.ring_close(), threads)
        elif op == "ragged_update":
            run_either(self.ragged_update(), threads)
        else:
            comptime assert False, "unknown op"

    def compare[op: StaticString](mut self) raises:
        self.run[op](0)
        var tail = self.tail.copy()
        var pooled = self.pooled.copy()
        var closed_pool = self.closed_pool.copy()
        for threads in grids(self.ragged_update()):
            self.run[op](threads)
            assert_equal(self.tail, tail)
            assert_equal(self.pooled, pooled)
            assert_equal(self.closed_pool, closed_pool)


def run_either[Call: KernelCall](call: Call, threads: Int) raises:
    if threads == 0:
        run_cpu(call)
    else:
        run_threads(call, threads)
