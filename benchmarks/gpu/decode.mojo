"""Decode steps: `tail_update` of both providers, checked, then timed."""

from std.math import ceildiv

from copies import Copies, DTYPE, copies_of, noise
from in_tree_kernels import HEAD_DIM
from in_tree_work import InTreeDecode, InTreeTailUpdate
from kernels.tail_update import TailUpdate
from max.gpu.host import DeviceContext
from oracle import IN_TREE_SLACK, Verdict, pool_of
from report import COPY, Workload, EMPTY, Entrant, IN_TREE, OURS, Report
from work import DeviceCopy, EmptyLaunch, OurWork, graph_of

comptime _LAUNCHES = 256
comptime _SPARE_SLOTS = 3
comptime _POOL = 5
comptime _POISON = 77


struct DecodeStep[kpool: Int, next_n: Int](Movable):
    """One step of a batch, and the device memory of both providers.

    Parameters:
        kpool: Tokens per pool.
        next_n: Tokens a row brings.
    """

    comptime COLUMNS = ceildiv(Self.next_n, Self.kpool)
    comptime SLOT = 2 * Self.kpool * HEAD_DIM
    comptime Call = TailUpdate[
        DTYPE, HEAD_DIM, Self.kpool, Self.next_n, Self.kpool
    ]

    var rows: Int
    var first_position: Int
    var copies: Int
    var k: Copies[DTYPE]
    var gate: Copies[DTYPE]
    var ape: Copies[DType.float32]
    var positions: Copies[DType.int32]
    var slot_idx: Copies[DType.uint32]
    # Ours, then MAX's.
    var tail: List[Copies[DTYPE]]
    var pooled: List[Copies[DTYPE]]
    var closed_pool: List[Copies[DType.int32]]

    def __init__(
        out self, ctx: DeviceContext, rows: Int, first_position: Int
    ) raises:
        var tokens = rows * Self.next_n
        var slots = rows + _SPARE_SLOTS
        self.rows = rows
        self.first_position = first_position
        self.copies = copies_of(2 * slots * Self.SLOT)
        var positions = List[Int32](capacity=tokens)
        for token in range(tokens):
            positions.append(Int32(first_position + token % Self.next_n))
        var slot_idx = List[UInt32](capacity=rows)
        for row in range(rows):
            slot_idx.append(UInt32(slots - 1 - row))
        self.k = {ctx, noise[DTYPE](tokens * HEAD_DIM, 4), self.copies}
        self.gate = {ctx, noise[DTYPE](tokens * HEAD_DIM, 16), self.copies}
        self.ape = {ctx, noise[DType.float32](Self.kpool * HEAD_DIM, 4), 1}
        self.positions = {ctx, positions^, self.copies}
        self.slot_idx = {ctx, slot_idx^, self.copies}
        self.tail = []
        self.pooled = []
        self.closed_pool = []
        var ring = noise[DTYPE](slots * Self.SLOT, 4)
        var cells = rows * Self.COLUMNS
        for _ in range(2):
            self.tail.append({ctx, ring.copy(), self.copies})
            self.pooled.append(
                {
                    ctx,
                    List[Scalar[DTYPE]](length=cells * HEAD_DIM, fill=_POISON),
                    self.copies,
                }
            )
            self.closed_pool.append(
                {ctx, List[Int32](length=cells, fill=_POISON), self.copies}
            )

    def bytes(self) -> Int:
        """Counts what must be read and written."""
        var token = 2 * HEAD_DIM * 2
        var row = 2 * Self.next_n * token + Self.COLUMNS * HEAD_DIM * 2
        if self.closing() > 0:
            row += (Self.kpool - 1) * token
        return self.rows * row

    def closing(self) -> Int:
        """Counts the pools that each row closes."""
        return (
            self.first_position + Self.next_n
        ) // Self.kpool - self.first_position // Self.kpool

    def ours(self) -> OurWork[Self.Call]:
        var calls = List[Self.Call]()
        var slots = self.rows + _SPARE_SLOTS
        for i in range(self.copies):
            calls.append(
                Self.Call(
                    self.tail[0].tile(i, slots, 2, Self.kpool, HEAD_DIM),
                    self.pooled[0].tile(i, self.rows, Self.COLUMNS, HEAD_DIM),
                    self.closed_pool[0].tile(i, self.rows, Self.COLUMNS),
                    self.k.tile(i, self.rows, Self.next_n, HEAD_DIM).as_imm(),
                    self.gate.tile(
                        i, self.rows, Self.next_n, HEAD_DIM
                    ).as_imm(),
                    self.ape.tile(0, Self.kpool, HEAD_DIM).as_imm(),
                    self.positions.tile(i, self.rows, Self.next_n).as_imm(),
                    self.slot_idx.tile(i, self.rows).as_imm(),
                    self.rows,
                )
            )
        return {calls^}

    def in_tree(self) -> InTreeTailUpdate[Self.kpool, Self.next_n]:
        var calls = List[InTreeDecode]()
        var slots = self.rows + _SPARE_SLOTS
        for i in range(self.copies):
            calls.append(
                InTreeDecode(
                    self.tail[1].tile(i, slots, 2, Self.kpool, HEAD_DIM),
                    self.pooled[1].tile(i, self.rows, Self.COLUMNS, HEAD_DIM),
                    self.closed_pool[1].tile(i, self.rows, Self.COLUMNS),
                    self.k.tile(i, self.rows, Self.next_n, HEAD_DIM),
                    self.gate.tile(i, self.rows, Self.next_n, HEAD_DIM),
                    self.ape.tile(0, Self.kpool, HEAD_DIM),
                    self.positions.tile(i, self.rows, Self.next_n),
                    self.slot_idx.tile(i, self.rows),
                    self.rows,
                )
            )
        return {calls^}

    def verify(self, provider: Int, copy: Int) raises:
        """Requires what a provider left to be what the step must leave.

        Args:
            provider: 0 for ours, 1 for MAX's.
            copy: The copy of the operands.

        Raises:
            Error: Naming the first element that is wrong.
        """
        var verdict = Verdict(IN_TREE_SLACK if provider == 1 else 1.0)
        ref before = self.tail[provider].values
        var tail = before.copy()
        var pooled = self.pooled[provider].read(copy)
        var closed_pool = self.closed_pool[provider].read(copy)
        for row in range(self.rows):
            var slot = Int(self.slot_idx.values[row]) * Self.SLOT
            var column = 0
            for token in range(Self.next_n):
                var position = self.first_position + token
                var entry = slot + position % Self.kpool * HEAD_DIM
                var source = (row * Self.next_n + token) * HEAD_DIM
                for c in range(HEAD_DIM):
                    tail[entry + c] = self.k.values[source + c]
                    tail[entry + Self.SLOT // 2 + c] = self.gate.values[
                        source + c
                    ]
                if position % Self.kpool != Self.kpool - 1:
                    continue
                # The members lie in the ring now, oldest first.
                var keys = List(tail[slot : slot + Self.SLOT // 2])
                var gates = List(tail[slot + Self.SLOT // 2 : slot + Self.SLOT])
                var offsets = List[Int]()
                for m in range(Self.kpool):
                    offsets.append(m * HEAD_DIM)
                var cell = row * Self.COLUMNS + column
                verdict.same(
                    String("closed_pool of row ", row),
                    closed_pool[cell],
                    Int32(position // Self.kpool),
                )
                for c in range(HEAD_DIM):
                    verdict.near(
                        String("pooled of row ", row, " channel ", c),
                        pooled[cell * HEAD_DIM + c],
                        pool_of(
                            keys, gates, self.ape.values, offsets, c, HEAD_DIM
                        ),
                    )
                column += 1
            for unused in range(column, Self.COLUMNS):
                var cell = row * Self.COLUMNS + unused
                verdict.same(
                    String("closed_pool of row ", row),
                    closed_pool[cell],
                    Int32(-1),
                )
                # MAX leaves the pooled key of an unused column as it was.
                if provider == 0:
                    for c in range(HEAD_DIM):
                        verdict.same(
                            String("unused pooled of row ", row),
                            pooled[cell * HEAD_DIM + c],
                            Scalar[DTYPE](0),
                        )
        var got = self.tail[provider].read(copy)
        for i in range(len(tail)):
            verdict.same(String("ring element ", i), got[i], tail[i])
        if verdict.fault:
            raise Error(verdict.fault)


def run_decode[
    kpool: Int, next_n: Int
](ctx: DeviceContext, mut report: Report, rows: Int, closes: Bool) raises:
    """Checks one step of both providers, then times it.

    Parameters:
        kpool: Tokens per pool.
        next_n: Tokens a row brings.

    Args:
        ctx: The device.
        report: Where the times go.
        rows: Batch rows.
        closes: Whether every row closes a pool, or none does.

    Raises:
        Error: If a provider is wrong.
    """
    var first_position = _POOL * kpool
    if closes:
        first_position += kpool - next_n
    var step = DecodeStep[kpool, next_n](ctx, rows, first_position)
    var launches = ceildiv(_LAUNCHES, step.copies) * step.copies
    var load = Workload(
        "tail_update",
        "closes" if closes else "fills",
        kpool,
        next_n,
        rows,
        rows * next_n,
        step.bytes(),
    )
    var entrants = List[Entrant]()
    entrants.append({OURS, graph_of(ctx, step.ours(), launches, step.copies)})
    entrants.append(
        {IN_TREE, graph_of(ctx, step.in_tree(), launches, step.copies)}
    )
    for provider in range(2):
        entrants[provider].graph.replay()
        ctx.synchronize()
        step.verify(provider, 0)
        step.verify(provider, step.copies - 1)
    var copy = DeviceCopy(ctx, load.bytes, step.copies)
    entrants.append({COPY, graph_of(ctx, copy, launches, step.copies)})
    entrants.append(
        {EMPTY, graph_of(ctx, EmptyLaunch(), launches, step.copies)}
    )
    report.race(ctx, load, entrants, launches, step.copies)
    # The graphs hold bare addresses.
    _ = step^
    _ = copy^
