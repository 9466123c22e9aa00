"""Runs the bodies of the ragged kernels on the CPU, thread by thread, shuffled.

See `test_decode_schedule` for why.
"""

from std.random import random_si64, seed
from std.testing import TestSuite, assert_equal, assert_raises

from kernels.copy_slots import CopySlots
from kernels.expand_topk import ExpandTopk
from kernels.launch import run_cpu
from kernels.vectors import WritePointer
from layout import TileTensor, row_major
from ragged_case import MAX_REQUESTS, RaggedCase, run_either
from schedule import (
    POISON,
    ROUNDS,
    SPARE_SLOTS,
    assert_only_slot_changed,
    distinct_slots,
    grids,
    noise,
    poisoned,
    run_threads,
)


def compare_ops[
    dtype: DType, head_dim: Int, kpool: Int, ring_len: Int
]() raises:
    for round in range(ROUNDS):
        seed(round)
        var batch = RaggedCase[dtype, head_dim, kpool, ring_len](
            1 + Int(random_si64(0, MAX_REQUESTS))
        )
        batch.compare["seed_tail"]()
        batch.compare["compress"]()
        batch.compare["ring_close"]()
        batch.compare["ragged_update"]()


def test_ragged_ops_leave_the_bytes_of_the_cpu_in_any_order() raises:
    compare_ops[DType.bfloat16, 128, 4, 4]()
    compare_ops[DType.bfloat16, 96, 3, 9]()
    compare_ops[DType.float16, 64, 16, 16]()
    compare_ops[DType.float32, 32, 1, 1]()
    compare_ops[DType.float32, 20, 2, 6]()


def bad_slots() -> RaggedCase[DType.bfloat16, 32, 4, 4]:
    """Four requests that each complete a pending pool; one slot is sound."""
    seed(1)
    var batch = RaggedCase[DType.bfloat16, 32, 4, 4](4)
    batch.k = noise[DType.bfloat16](12 * 32)
    batch.gate = noise[DType.bfloat16](12 * 32)
    batch.cache_lengths = [UInt32(2), 2, 2, 2]
    batch.input_row_offsets = [UInt32(0), 3, 6, 9, 12]
    batch.slot_idx = [UInt32(7), 1, 3545, UInt32.MAX]
    batch.pooled = poisoned[DType.bfloat16](6 * 32)
    batch.closed_pool = poisoned[DType.int32](6)
    return batch^


def check_bad_slots[op: StaticString](closed_pool: List[Int32]) raises:
    var batch = bad_slots()
    with assert_raises(contains="slot_idx[0] must be below max_slots (7)"):
        batch.run[op](0)
    assert_equal(batch.tail, batch.initial)
    assert_equal(batch.pooled, poisoned[DType.bfloat16](6 * 32))
    batch.run[op](4 * 32)
    assert_equal(batch.closed_pool, closed_pool)
    comptime if op == "ring_close":
        assert_equal(batch.tail, batch.initial)
    else:
        assert_only_slot_changed(batch.tail, batch.initial, 1, 2 * 4 * 32)


def test_threads_skip_requests_whose_slot_the_cpu_refuses() raises:
    check_bad_slots["seed_tail"](
        [POISON, POISON, POISON, POISON, POISON, POISON]
    )
    check_bad_slots["ring_close"]([-1, 0, -1, -1, POISON, POISON])
    check_bad_slots["ragged_update"]([-1, 0, -1, -1, -1, -1])


def check_bad_offsets[op: StaticString](message: StaticString) raises:
    var batch = bad_slots()
    batch.slot_idx = [UInt32(5), 1, 2, 3]
    batch.input_row_offsets = [UInt32(0), 3, 2, 0, UInt32.MAX]
    batch.pool_row_offsets = [UInt32(0), 0, 0, 0, 0]
    with assert_raises(contains=message):
        batch.run[op](0)
    assert_equal(batch.tail, batch.initial)
    assert_equal(batch.pooled, poisoned[DType.bfloat16](6 * 32))
    batch.run[op](4 * 32)
    comptime if op == "seed_tail" or op == "ragged_update":
        assert_only_slot_changed(batch.tail, batch.initial, 5, 2 * 4 * 32)


def test_threads_skip_requests_whose_rows_the_cpu_refuses() raises:
    check_bad_offsets["seed_tail"]("input_row_offsets[2] must not be below")
    check_bad_offsets["compress"]("input_row_offsets[2] must not be below")
    check_bad_offsets["ring_close"]("input_row_offsets[2] must not be below")
    check_bad_offsets["ragged_update"]("input_row_offsets[2] must not be below")


def test_compress_refuses_pool_offsets_that_are_no_sums() raises:
    var batch = bad_slots()
    batch.cache_lengths = [UInt32(0), 1, 0, 0]
    batch.input_row_offsets = [UInt32(0), 4, 4, 8, 12]
    batch.pool_row_offsets = [UInt32(0), 1, 1, 3, 3]
    with assert_raises(
        contains=(
            "compress: pool_row_offsets[3] must be 2, the whole pools of the"
            " requests before it, got 3"
        )
    ):
        batch.run["compress"](0)
    assert_equal(batch.pooled, poisoned[DType.bfloat16](6 * 32))


def compare_expansions[
    kpool: Int, pool_topk: Int, always_select_tail: Bool
]() raises:
    comptime Call = ExpandTopk[kpool, pool_topk, always_select_tail]
    for round in range(ROUNDS):
        seed(round)
        var requests = 1 + Int(random_si64(0, MAX_REQUESTS))
        var offsets: List[UInt32] = [0]
        var lengths = List[UInt32](capacity=requests)
        var tokens = 0
        for _ in range(requests):
            tokens += Int(random_si64(0, 5))
            offsets.append(UInt32(tokens))
            lengths.append(UInt32(random_si64(0, 60)))
        var ids = List[Int32](capacity=tokens * pool_topk)
        for _ in range(tokens * pool_topk):
            ids.append(Int32(random_si64(-3, 30)))
        var got = poisoned[DType.int32](tokens * Call.COLUMNS)
        var want = got.copy()

        def call(mut out_rows: List[Int32]) {imm} -> Call:
            return Call(
                TileTensor(Span(out_rows), row_major(tokens, Call.COLUMNS)),
                TileTensor(ids, row_major(tokens, pool_topk)).as_imm(),
                TileTensor(offsets, row_major(requests + 1)).as_imm(),
                TileTensor(lengths, row_major(requests)).as_imm(),
                requests,
            )

        run_cpu(call(want))
        for threads in grids(call(got)):
            got = poisoned[DType.int32](len(want))
            run_threads(call(got), threads)
            assert_equal(got, want)


def test_expand_topk_leaves_the_rows_of_the_cpu_in_any_order() raises:
    compare_expansions[4, 5, True]()
    compare_expansions[3, 40, False]()
    compare_expansions[16, 33, True]()
    compare_expansions[1, 17, True]()


def address[
    dtype: DType
](mut values: List[Scalar[dtype]]) -> WritePointer[dtype]:
    return values.unsafe_ptr().unsafe_origin_cast[MutUntrackedOrigin]()


def test_copy_slots_reads_all_before_it_writes_in_any_order() raises:
    comptime SLOT = 24
    comptime SLOTS = 9
    comptime Gather = CopySlots[DType.bfloat16, SLOT, False]
    comptime Scatter = CopySlots[DType.bfloat16, SLOT, True]
    for round in range(ROUNDS):
        seed(round)
        var initial = noise[DType.bfloat16](SLOTS * SLOT)
        var dst = distinct_slots(SLOTS - SPARE_SLOTS)
        var src = distinct_slots(SLOTS - SPARE_SLOTS)
        # One pair outside the ring, which threads skip.
        dst[0] = UInt32(SLOTS)
        var want = initial.copy()
        for pair in range(1, len(dst)):
            for i in range(SLOT):
                want[Int(dst[pair]) * SLOT + i] = initial[
                    Int(src[pair]) * SLOT + i
                ]
        var tail = initial.copy()
        var scratch = poisoned[DType.bfloat16](len(dst) * SLOT)
        var pairs = row_major(len(dst))
        var gather = Gather(
            address(tail),
            address(scratch),
            TileTensor(src, pairs).as_imm(),
            TileTensor(dst, pairs).as_imm(),
            SLOTS,
        )
        var scatter = Scatter(
            address(tail),
            address(scratch),
            TileTensor(src, pairs).as_imm(),
            TileTensor(dst, pairs).as_imm(),
            SLOTS,
        )
        with assert_raises(contains="dst_slots[0] must be below max_slots (9)"):
            run_cpu(gather)
        for threads in grids(gather):
            tail = initial.copy()
            scratch = poisoned[DType.bfloat16](len(dst) * SLOT)
            gather.tail = address(tail)
            gather.scratch = address(scratch)
            scatter.tail = address(tail)
            scatter.scratch = address(scratch)
            run_threads(gather, threads)
            run_threads(scatter, threads)
            assert_equal(tail, want)
        # The calls hold bare addresses.
        _ = src^
        _ = dst^
        _ = scratch^


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
