"""Prefill chunks: operands of both providers, and what must come out."""

from copies import Copies, DTYPE, copies_of, noise
from in_tree_kernels import HEAD_DIM
from in_tree_work import InTreeChunks
from kernels.compress import Compress
from kernels.ragged_update import RaggedUpdate
from kernels.seed_tail import SeedTail
from max.gpu.host import DeviceContext
from oracle import IN_TREE_SLACK, Pool, Verdict, pool_of
from work import OurWork

comptime _SPARE_SLOTS = 3
comptime _POISON = 77


struct Prefill[kpool: Int](Movable):
    """First chunks of a batch, and the device memory of both providers.

    Request `r` brings `tokens // requests - (r + 1) % kpool` tokens, so that
    the chunks end everywhere in a pool.

    Parameters:
        kpool: Tokens per pool.
    """

    comptime SLOT = 2 * Self.kpool * HEAD_DIM
    comptime CompressCall = Compress[DTYPE, HEAD_DIM, Self.kpool]
    comptime SeedCall = SeedTail[DTYPE, HEAD_DIM, Self.kpool, Self.kpool]
    comptime RaggedCall = RaggedUpdate[DTYPE, HEAD_DIM, Self.kpool, Self.kpool]

    var requests: Int
    var tokens: Int
    var ragged_rows: Int
    var copies: Int
    var exact: List[Pool]
    var k: Copies[DTYPE]
    var gate: Copies[DTYPE]
    var ape: Copies[DType.float32]
    var input_row_offsets: Copies[DType.uint32]
    var pool_row_offsets: Copies[DType.uint32]
    var cache_lengths: Copies[DType.uint32]
    var slot_idx: Copies[DType.uint32]
    var tail: Copies[DTYPE]
    var pooled: Copies[DTYPE]
    var closed_pool: Copies[DType.int32]

    def __init__(
        out self, ctx: DeviceContext, tokens: Int, requests: Int
    ) raises:
        var offsets: List[UInt32] = [0]
        var pools: List[UInt32] = [0]
        var slot_idx = List[UInt32](capacity=requests)
        var slots = requests + _SPARE_SLOTS
        for request in range(requests):
            var count = max(tokens // requests - (request + 1) % Self.kpool, 0)
            offsets.append(offsets[request] + UInt32(count))
            pools.append(pools[request] + UInt32(count // Self.kpool))
            slot_idx.append(UInt32(slots - 1 - request))
        self.requests = requests
        self.tokens = Int(offsets[requests])
        self.ragged_rows = (
            self.tokens + requests * (Self.kpool - 1)
        ) // Self.kpool
        self.copies = copies_of(2 * self.tokens * HEAD_DIM * 2)
        var elements = self.tokens * HEAD_DIM
        self.k = {ctx, noise[DTYPE](elements, 4), self.copies}
        self.gate = {ctx, noise[DTYPE](elements, 16), self.copies}
        self.ape = {ctx, noise[DType.float32](Self.kpool * HEAD_DIM, 4), 1}
        self.input_row_offsets = {ctx, offsets^, self.copies}
        self.pool_row_offsets = {ctx, pools^, self.copies}
        self.cache_lengths = {
            ctx,
            List[UInt32](length=requests, fill=0),
            self.copies,
        }
        self.slot_idx = {ctx, slot_idx^, self.copies}
        self.tail = {ctx, noise[DTYPE](slots * Self.SLOT, 4), self.copies}
        self.pooled = {
            ctx,
            List[Scalar[DTYPE]](
                length=self.ragged_rows * HEAD_DIM, fill=_POISON
            ),
            self.copies,
        }
        self.closed_pool = {
            ctx,
            List[Int32](length=self.ragged_rows, fill=_POISON),
            self.copies,
        }
        self.exact = []
        for request in range(requests):
            for pool in range(self.pools_of(request)):
                var rows = List[Int]()
                for m in range(Self.kpool):
                    var row = self.first_row(request) + pool * Self.kpool + m
                    rows.append(row * HEAD_DIM)
                for c in range(HEAD_DIM):
                    self.exact.append(
                        pool_of(
                            self.k.values,
                            self.gate.values,
                            self.ape.values,
                            rows,
                            c,
                            HEAD_DIM,
                        )
                    )

    def first_row(self, request: Int) -> Int:
        return Int(self.input_row_offsets.values[request])

    def count(self, request: Int) -> Int:
        return self.first_row(request + 1) - self.first_row(request)

    def first_pool(self, request: Int) -> Int:
        return Int(self.pool_row_offsets.values[request])

    def pools_of(self, request: Int) -> Int:
        return self.first_pool(request + 1) - self.first_pool(request)

    def pools(self) -> Int:
        return self.first_pool(self.requests)

    def output_rows(self) -> Int:
        """Rows of compress's output: as many as could be needed."""
        return self.tokens // Self.kpool

    def reset(self, ctx: DeviceContext) raises:
        """Undoes what a provider has written."""
        self.tail.reset(ctx)
        self.pooled.reset(ctx)
        self.closed_pool.reset(ctx)

    def compress(self) -> OurWork[Self.CompressCall]:
        var calls = List[Self.CompressCall]()
        for i in range(self.copies):
            calls.append(
                Self.CompressCall(
                    self.pooled.tile(i, self.output_rows(), HEAD_DIM),
                    self.k.tile(i, self.tokens, HEAD_DIM).as_imm(),
                    self.gate.tile(i, self.tokens, HEAD_DIM).as_imm(),
                    self.ape.tile(0, Self.kpool, HEAD_DIM).as_imm(),
                    self.input_row_offsets.tile(i, self.requests + 1).as_imm(),
                    self.pool_row_offsets.tile(i, self.requests + 1).as_imm(),
                    self.cache_lengths.tile(i, self.requests).as_imm(),
                    self.requests,
                )
            )
        return {calls^}

    def seed_tail(self) -> OurWork[Self.SeedCall]:
        var calls = List[Self.SeedCall]()
        var slots = self.requests + _SPARE_SLOTS
        for i in range(self.copies):
            calls.append(
                Self.SeedCall(
                    self.tail.tile(i, slots, 2, Self.kpool, HEAD_DIM),
                    self.k.tile(i, self.tokens, HEAD_DIM).as_imm(),
                    self.gate.tile(i, self.tokens, HEAD_DIM).as_imm(),
                    self.input_row_offsets.tile(i, self.requests + 1).as_imm(),
                    self.cache_lengths.tile(i, self.requests).as_imm(),
                    self.slot_idx.tile(i, self.requests).as_imm(),
                    self.requests,
                )
            )
        return {calls^}

    def ragged_update(self) -> OurWork[Self.RaggedCall]:
        var calls = List[Self.RaggedCall]()
        var slots = self.requests + _SPARE_SLOTS
        for i in range(self.copies):
            calls.append(
                Self.RaggedCall(
                    self.pooled.tile(i, self.ragged_rows, HEAD_DIM),
                    self.closed_pool.tile(i, self.ragged_rows),
                    self.tail.tile(i, slots, 2, Self.kpool, HEAD_DIM),
                    self.k.tile(i, self.tokens, HEAD_DIM).as_imm(),
                    self.gate.tile(i, self.tokens, HEAD_DIM).as_imm(),
                    self.ape.tile(0, Self.kpool, HEAD_DIM).as_imm(),
                    self.input_row_offsets.tile(i, self.requests + 1).as_imm(),
                    self.cache_lengths.tile(i, self.requests).as_imm(),
                    self.slot_idx.tile(i, self.requests).as_imm(),
                    self.requests,
                )
            )
        return {calls^}

    def in_tree(self) -> List[InTreeChunks]:
        var calls = List[InTreeChunks]()
        var slots = self.requests + _SPARE_SLOTS
        for i in range(self.copies):
            calls.append(
                InTreeChunks(
                    self.tail.tile(i, slots, 2, Self.kpool, HEAD_DIM),
                    self.pooled.tile(i, self.pools(), HEAD_DIM),
                    self.k.tile(i, self.tokens, HEAD_DIM),
                    self.gate.tile(i, self.tokens, HEAD_DIM),
                    self.ape.tile(0, Self.kpool, HEAD_DIM),
                    self.input_row_offsets.tile(i, self.requests + 1),
                    self.pool_row_offsets.tile(i, self.requests + 1),
                    self.cache_lengths.tile(i, self.requests),
                    self.slot_idx.tile(i, self.requests),
                    self.pools(),
                    self.requests,
                )
            )
        return calls^

    def verify_pooled(self, copy: Int, ragged: Bool, in_tree: Bool) raises:
        """Requires the pooled keys to be right.

        Args:
            copy: The copy of the operands.
            ragged: Whether they stand where `ragged_update` puts them.
            in_tree: Whether MAX wrote them; it leaves other rows as they were.

        Raises:
            Error: Naming the first element that is wrong.
        """
        var verdict = Verdict(IN_TREE_SLACK if in_tree else 1.0)
        var pooled = self.pooled.read(copy)
        var closed_pool = self.closed_pool.read(copy)
        var rows = self.ragged_rows if ragged else self.output_rows()
        var pool_of_row = List[Int](length=rows, fill=-1)
        for request in range(self.requests):
            for pool in range(self.pools_of(request)):
                var row = self.first_pool(request) + pool
                if ragged:
                    row = (
                        pool
                        + (self.first_row(request) + request * (Self.kpool - 1))
                        // Self.kpool
                    )
                    verdict.same(
                        String("closed_pool of row ", row),
                        closed_pool[row],
                        Int32(pool),
                    )
                pool_of_row[row] = self.first_pool(request) + pool
        for row in range(rows):
            var pool = pool_of_row[row]
            if pool < 0 and in_tree:
                continue
            if pool < 0 and ragged:
                verdict.same("unused closed_pool", closed_pool[row], Int32(-1))
            for c in range(HEAD_DIM):
                var got = pooled[row * HEAD_DIM + c]
                if pool < 0:
                    verdict.same("unused pooled", got, Scalar[DTYPE](0))
                else:
                    verdict.near("pooled", got, self.exact[pool * HEAD_DIM + c])
        if verdict.fault:
            raise Error(verdict.fault)

    def verify_tail(self, copy: Int, ragged: Bool) raises:
        """Requires the ring to hold the right tokens, and all else untouched.

        Args:
            copy: The copy of the operands.
            ragged: Whether `ragged_update` wrote it, which stashes more.

        Raises:
            Error: Naming the first element that is wrong.
        """
        var verdict = Verdict(1.0)
        var want = self.tail.values.copy()
        for request in range(self.requests):
            var end = self.count(request)
            var slot = Int(self.slot_idx.values[request]) * Self.SLOT
            var first = end // Self.kpool * Self.kpool
            for position in range(
                max(end - Self.kpool, 0) if ragged else first, end
            ):
                var entry = slot + position % Self.kpool * HEAD_DIM
                var row = (self.first_row(request) + position) * HEAD_DIM
                for c in range(HEAD_DIM):
                    want[entry + c] = self.k.values[row + c]
                    want[entry + Self.SLOT // 2 + c] = self.gate.values[row + c]
        var got = self.tail.read(copy)
        for i in range(len(want)):
            verdict.same(String("ring element ", i), got[i], want[i])
        if verdict.fault:
            raise Error(verdict.fault)
