"""Runs the body of the decode kernel on the CPU, thread by thread, shuffled.

The GPU kernel calls `run_thread(thread, threads)` and nothing else, so doing the
same for every thread of a grid, in any order, shows what a GPU computes. It must
leave the bytes that the CPU driver leaves, and skip a row that it refuses.
"""

from std.random import random_float64, random_si64, seed
from std.testing import TestSuite, assert_equal, assert_raises

from kernels.launch import run_cpu
from kernels.tail_update import TailUpdate
from layout import TileTensor, row_major
from schedule import (
    ROUNDS,
    SPARE_SLOTS,
    assert_only_slot_changed,
    distinct_slots,
    grids,
    noise,
    poisoned,
    run_threads,
)


struct DecodeBatch[
    dtype: DType, head_dim: Int, kpool: Int, next_n: Int, ring_len: Int
]:
    """Random operands of `tail_update`, and what a call leaves."""

    comptime Call = TailUpdate[
        Self.dtype, Self.head_dim, Self.kpool, Self.next_n, Self.ring_len
    ]
    comptime COLUMNS = Self.Call.MAX_CLOSED

    var rows: Int
    var initial: List[Scalar[Self.dtype]]
    var tail: List[Scalar[Self.dtype]]
    var pooled: List[Scalar[Self.dtype]]
    var closed_pool: List[Int32]
    var k: List[Scalar[Self.dtype]]
    var gate: List[Scalar[Self.dtype]]
    var ape: List[Float32]
    var positions: List[Int32]
    var slot_idx: List[UInt32]

    def __init__(out self, rows: Int):
        comptime TOKEN = Self.next_n * Self.head_dim
        comptime SLOT = 2 * Self.ring_len * Self.head_dim
        self.rows = rows
        self.initial = noise[Self.dtype]((rows + SPARE_SLOTS) * SLOT)
        self.tail = self.initial.copy()
        self.pooled = poisoned[Self.dtype](rows * Self.COLUMNS * Self.head_dim)
        self.closed_pool = poisoned[DType.int32](rows * Self.COLUMNS)
        self.k = noise[Self.dtype](rows * TOKEN)
        self.gate = noise[Self.dtype](rows * TOKEN)
        self.ape = noise[DType.float32](Self.kpool * Self.head_dim)
        self.slot_idx = distinct_slots(rows)
        self.positions = List[Int32](capacity=rows * Self.next_n)
        for _ in range(rows):
            var position = Int32(random_si64(0, 40))
            for _ in range(Self.next_n):
                if random_float64() < 0.2:
                    self.positions.append(-1)
                else:
                    self.positions.append(position)
                    position += 1

    def call(mut self) -> Self.Call:
        """Resets the outputs and binds them to a call."""
        self.tail = self.initial.copy()
        self.pooled = poisoned[Self.dtype](len(self.pooled))
        self.closed_pool = poisoned[DType.int32](len(self.closed_pool))
        var slots = self.rows + SPARE_SLOTS
        var tokens = row_major(self.rows, Self.next_n, Self.head_dim)
        return Self.Call(
            TileTensor(
                Span(self.tail),
                row_major(slots, 2, Self.ring_len, Self.head_dim),
            ),
            TileTensor(
                Span(self.pooled),
                row_major(self.rows, Self.COLUMNS, Self.head_dim),
            ),
            TileTensor(
                Span(self.closed_pool), row_major(self.rows, Self.COLUMNS)
            ),
            TileTensor(self.k, tokens).as_imm(),
            TileTensor(self.gate, tokens).as_imm(),
            TileTensor(self.ape, row_major(Self.kpool, Self.head_dim)).as_imm(),
            TileTensor(
                self.positions, row_major(self.rows, Self.next_n)
            ).as_imm(),
            TileTensor(self.slot_idx, row_major(self.rows)).as_imm(),
            self.rows,
        )

    def compare(mut self) raises:
        run_cpu(self.call())
        var tail = self.tail.copy()
        var pooled = self.pooled.copy()
        var closed_pool = self.closed_pool.copy()
        for threads in grids(self.call()):
            run_threads(self.call(), threads)
            assert_equal(self.tail, tail)
            assert_equal(self.pooled, pooled)
            assert_equal(self.closed_pool, closed_pool)


def compare_decode[
    dtype: DType, head_dim: Int, kpool: Int, next_n: Int, ring_len: Int
]() raises:
    for round in range(ROUNDS):
        seed(round)
        var batch = DecodeBatch[dtype, head_dim, kpool, next_n, ring_len](
            1 + Int(random_si64(0, 9))
        )
        batch.compare()


def test_tail_update_threads_in_any_order_leave_the_bytes_of_the_cpu() raises:
    compare_decode[DType.bfloat16, 128, 4, 1, 4]()
    compare_decode[DType.bfloat16, 128, 4, 4, 7]()
    compare_decode[DType.bfloat16, 96, 3, 7, 3]()
    compare_decode[DType.float16, 64, 16, 2, 16]()
    compare_decode[DType.float32, 32, 1, 3, 1]()
    compare_decode[DType.float32, 20, 2, 5, 6]()


def test_tail_update_threads_skip_rows_the_cpu_refuses() raises:
    seed(1)
    var batch = DecodeBatch[DType.bfloat16, 32, 4, 1, 4](4)
    batch.slot_idx = [UInt32(1), 7, 3545, UInt32.MAX]
    batch.positions = [Int32(7), 7, 7, 7]
    with assert_raises(contains="slot_idx[1] must be below max_slots (7)"):
        run_cpu(batch.call())
    assert_equal(batch.tail, batch.initial)
    run_threads(batch.call(), 4 * 32)
    assert_equal(batch.closed_pool, [Int32(1), -1, -1, -1])
    assert_only_slot_changed(batch.tail, batch.initial, 1, 2 * 4 * 32)

    var gap = DecodeBatch[DType.bfloat16, 32, 4, 9, 4](2)
    gap.slot_idx = [UInt32(2), 4]
    for token in range(9):
        gap.positions[token] = Int32(4 * token + 3)
        gap.positions[9 + token] = Int32(token)
    with assert_raises(contains="positions[0] must be consecutive from 3"):
        run_cpu(gap.call())
    assert_equal(gap.tail, gap.initial)
    run_threads(gap.call(), 2 * 32)
    assert_equal(gap.closed_pool, [Int32(-1), -1, -1, 0, 1, -1])
    assert_only_slot_changed(gap.tail, gap.initial, 4, 2 * 4 * 32)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
