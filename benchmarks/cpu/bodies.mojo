"""Times the row bodies on the CPU, without MAX around them.

Prints CSV; with `--quick` fewer cases. `copy` moves the bytes that the op must
read and write; `kernel` is the op on one thread, checks included, and
`kernel_all_threads` as MAX would run it.
"""

from std.random import random_float64, seed, shuffle
from std.sys import argv, size_of

from kernels.compress import Compress
from kernels.ragged_update import RaggedUpdate
from kernels.seed_tail import SeedTail
from kernels.tail_update import TailUpdate
from kernels.vectors import WritePointer
from layout import TileTensor, row_major
from timing import Setting, measure

comptime HEAD_DIM = 128
comptime COLUMNS = (
    "case,provider,dtype,n,kpool,next_n,median_ns,p20_ns,p80_ns,bytes_moved,"
    "over_copy_median,over_copy_p20,over_copy_p80"
)


struct Memory[dtype: DType]:
    """Random elements, aligned as MAX aligns a buffer."""

    comptime Line = SIMD[Self.dtype, 64 // size_of[Scalar[Self.dtype]]()]

    var lines: List[Self.Line]

    def __init__(out self, count: Int):
        self.lines = List[Self.Line](
            length=count // Self.Line.length + 1, fill=0
        )
        for i in range(len(self.lines)):
            for j in range(Self.Line.length):
                self.lines[i][j] = ((random_float64() - 0.5) * 8).cast[
                    Self.dtype
                ]()

    def data(mut self) -> WritePointer[Self.dtype]:
        return (
            self.lines.unsafe_ptr()
            .unsafe_bitcast[Scalar[Self.dtype]]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )


def shuffled_slots(count: Int) -> List[UInt32]:
    var slots = List[UInt32](capacity=count)
    for slot in range(count):
        slots.append(UInt32(slot))
    shuffle(slots)
    return slots^


def decode[dtype: DType, kpool: Int, next_n: Int](rows: Int) raises:
    """Times `tail_update` with no row and with every row closing a pool."""
    comptime Call = TailUpdate[dtype, HEAD_DIM, kpool, next_n, kpool]
    comptime ROW = HEAD_DIM * size_of[Scalar[dtype]]()
    var max_slots = 2 * rows
    var tail = Memory[dtype](max_slots * 2 * kpool * HEAD_DIM)
    var k = Memory[dtype](rows * next_n * HEAD_DIM)
    var gate = Memory[dtype](rows * next_n * HEAD_DIM)
    var ape = Memory[DType.float32](kpool * HEAD_DIM)
    var pooled = Memory[dtype](rows * Call.MAX_CLOSED * HEAD_DIM)
    var closed_pool = List[Int32](length=rows * Call.MAX_CLOSED, fill=0)
    var slot_idx = shuffled_slots(max_slots)
    for closing in [False, True]:
        if not closing and next_n >= kpool:
            continue
        var first = kpool - next_n if closing else 0
        var positions = List[Int32](capacity=rows * next_n)
        for _ in range(rows):
            for token in range(next_n):
                positions.append(Int32(4 * kpool + first + token))
        var tokens = row_major(rows, next_n, HEAD_DIM)
        var call = Call(
            TileTensor(tail.data(), row_major(max_slots, 2, kpool, HEAD_DIM)),
            TileTensor(
                pooled.data(), row_major(rows, Call.MAX_CLOSED, HEAD_DIM)
            ),
            TileTensor(Span(closed_pool), row_major(rows, Call.MAX_CLOSED)),
            TileTensor(k.data(), tokens).as_imm(),
            TileTensor(gate.data(), tokens).as_imm(),
            TileTensor(ape.data(), row_major(kpool, HEAD_DIM)).as_imm(),
            TileTensor(positions, row_major(rows, next_n)).as_imm(),
            TileTensor(slot_idx, row_major(max_slots)).as_imm(),
            rows,
        )
        # Each token is read and stashed, each pooled key written; a closing row
        # reads its other members from the ring.
        var moved = 4 * next_n + Call.MAX_CLOSED
        if closing:
            moved += 2 * (kpool - next_n)
        var name = "tail_update_closing" if closing else "tail_update"
        measure(
            call,
            Setting(name, dtype, rows, kpool, next_n, rows * moved * ROW),
        )
        _ = positions^
    _ = pooled^
    _ = closed_pool^
    _ = tail^
    _ = k^
    _ = gate^
    _ = ape^
    _ = slot_idx^


def prefill[dtype: DType, kpool: Int](tokens: Int, requests: Int) raises:
    """Times `compress`, `ragged_update` and `seed_tail` on one prefill batch.
    """
    comptime ROW = HEAD_DIM * size_of[Scalar[dtype]]()
    var k = Memory[dtype](tokens * HEAD_DIM)
    var gate = Memory[dtype](tokens * HEAD_DIM)
    var ape = Memory[DType.float32](kpool * HEAD_DIM)
    var tail = Memory[dtype](requests * 2 * kpool * HEAD_DIM)
    var offsets = List[UInt32](capacity=requests + 1)
    var pool_offsets = List[UInt32](capacity=requests + 1)
    var pools = 0
    for request in range(requests + 1):
        offsets.append(UInt32(tokens * request // requests))
        if request:
            pools += Int(offsets[request] - offsets[request - 1]) // kpool
        pool_offsets.append(UInt32(pools))
    var cache_lengths = List[UInt32](length=requests, fill=0)
    # So that every request leaves kpool - 1 tokens to seed.
    var unfinished = List[UInt32](length=requests, fill=UInt32(kpool - 1))
    var slot_idx = shuffled_slots(requests)
    var rows = (tokens + requests * (kpool - 1)) // kpool
    var pooled = Memory[dtype](rows * HEAD_DIM)
    var closed_pool = List[Int32](length=rows, fill=0)

    var offsets_tile = TileTensor(offsets, row_major(requests + 1)).as_imm()
    var lengths_tile = TileTensor(cache_lengths, row_major(requests)).as_imm()
    var slots_tile = TileTensor(slot_idx, row_major(requests)).as_imm()
    var k_tile = TileTensor(k.data(), row_major(tokens, HEAD_DIM)).as_imm()
    var gate_tile = TileTensor(
        gate.data(), row_major(tokens, HEAD_DIM)
    ).as_imm()
    var ape_tile = TileTensor(ape.data(), row_major(kpool, HEAD_DIM)).as_imm()
    var tail_tile = TileTensor(
        tail.data(), row_major(requests, 2, kpool, HEAD_DIM)
    )
    var name = String(t"_{requests}_requests")
    measure(
        Compress[dtype, HEAD_DIM, kpool](
            TileTensor(pooled.data(), row_major(tokens // kpool, HEAD_DIM)),
            k_tile,
            gate_tile,
            ape_tile,
            offsets_tile,
            TileTensor(pool_offsets, row_major(requests + 1)).as_imm(),
            lengths_tile,
            requests,
        ),
        Setting(
            "compress" + name,
            dtype,
            tokens,
            kpool,
            1,
            (2 * tokens + tokens // kpool) * ROW,
        ),
    )
    measure(
        RaggedUpdate[dtype, HEAD_DIM, kpool, kpool](
            TileTensor(pooled.data(), row_major(rows, HEAD_DIM)),
            TileTensor(Span(closed_pool), row_major(rows)),
            tail_tile,
            k_tile,
            gate_tile,
            ape_tile,
            offsets_tile,
            lengths_tile,
            slots_tile,
            requests,
        ),
        Setting(
            "ragged_update" + name,
            dtype,
            tokens,
            kpool,
            1,
            (2 * tokens + rows + 4 * kpool * requests) * ROW,
        ),
    )
    measure(
        SeedTail[dtype, HEAD_DIM, kpool, kpool](
            tail_tile,
            k_tile,
            gate_tile,
            offsets_tile,
            TileTensor(unfinished, row_major(requests)).as_imm(),
            slots_tile,
            requests,
        ),
        Setting(
            "seed_tail" + name,
            dtype,
            tokens,
            kpool,
            1,
            4 * requests * (kpool - 1) * ROW,
        ),
    )
    _ = pooled^
    _ = closed_pool^
    _ = tail^
    _ = k^
    _ = gate^
    _ = ape^
    _ = offsets^
    _ = pool_offsets^
    _ = cache_lengths^
    _ = unfinished^
    _ = slot_idx^


def run[dtype: DType](quick: Bool) raises:
    if quick:
        decode[dtype, 4, 1](256)
        prefill[dtype, 4](32 * 1024, 16)
        return
    comptime for kpool in [4, 16]:
        for rows in [1, 8, 64, 256, 1024]:
            decode[dtype, kpool, 1](rows)
            decode[dtype, kpool, 4](rows)
    for requests in [1, 16, 256]:
        for tokens in [1024, 32 * 1024, 128 * 1024]:
            prefill[dtype, 4](tokens, requests)


def main() raises:
    var quick = len(argv()) > 1 and argv()[1] == "--quick"
    seed(1)
    print(COLUMNS)
    run[DType.float32](quick)
    run[DType.bfloat16](quick)
