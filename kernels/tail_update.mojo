"""`mo.mla.kpool.tail_update`: decode stashes tokens and closes pools."""

from std.math import ceildiv, gcd
from std.utils.static_tuple import StaticTuple
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA

from .checks import SlotOwners
from .decode import DecodeRows, DecodeStep
from .launch import KernelCall, block_threads, run_grid_thread
from .lanes import LaneTable, Lanes, cpu_lanes
from .members import PendingPool, pool_channels
from .ring import TailRing, ring_len_of
from .tokens import TokenRows
from .vectors import (
    ReadPointer,
    WritePointer,
    cpu_copy_width,
    readable,
    store,
    store_zero,
    writable,
)


struct TailUpdate[
    dtype: DType, head_dim: Int, kpool: Int, next_n: Int, ring_len: Int
](KernelCall):
    """One call: its operands, and the body that CPU and GPU both run.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.
        kpool: Tokens per pool.
        next_n: Tokens appended per row.
        ring_len: Entries per slot and plane.
    """

    comptime OP: StaticString = "tail_update"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[Self.head_dim]()
    """The most threads a GPU block may have."""
    # A decode step is small, so its time on a GPU is launch and latency: more
    # threads with less to do each beat wide accesses.
    comptime GPU_LANES = Lanes(gcd(Self.head_dim, 2), False)
    """Channels a GPU thread takes."""
    comptime MAX_CLOSED = ceildiv(Self.next_n, Self.kpool)
    """Columns of `pooled` and `closed_pool`: the most pools a row can close."""

    var tail: TailRing[Self.dtype, Self.head_dim, Self.ring_len]
    """The ring, updated in place."""
    var pooled: WritePointer[Self.dtype]
    """Output `[rows, MAX_CLOSED, head_dim]`."""
    var closed_pool: WritePointer[DType.int32]
    """Output `[rows, MAX_CLOSED]`."""
    var tokens: TokenRows[Self.dtype, Self.head_dim]
    """Keys and gate scores `[rows, next_n, head_dim]`."""
    var ape: ReadPointer[DType.float32]
    """Within-pool position embedding `[kpool, head_dim]`."""
    var steps: DecodeRows[Self.next_n]
    """Positions and slots of the rows."""
    var rows: Int
    """Batch rows."""

    @inline(.always)
    def __init__(
        out self,
        tail: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
        pooled: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
        closed_pool: TileTensor[mut=True, .int32, address_space=.GENERIC, ...],
        k: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        gate: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        ape: TileTensor[mut=False, .float32, address_space=.GENERIC, ...],
        positions: TileTensor[mut=False, .int32, address_space=.GENERIC, ...],
        slot_idx: TileTensor[mut=False, .uint32, address_space=.GENERIC, ...],
        rows: Int,
    ):
        """Takes the op's operands, all dense.

        Args:
            tail: The ring, `[max_slots, 2, ring_len, head_dim]`.
            pooled: Output `[rows, MAX_CLOSED, head_dim]`.
            closed_pool: Output `[rows, MAX_CLOSED]`.
            k: Keys `[rows, next_n, head_dim]`.
            gate: Gate scores `[rows, next_n, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            positions: Absolute positions `[rows, next_n]`.
            slot_idx: Ring slots `[rows]`.
            rows: Batch rows.
        """
        self.tail = TailRing[Self.dtype, Self.head_dim, Self.ring_len](tail)
        self.pooled = writable(pooled)
        self.closed_pool = writable(closed_pool)
        self.tokens = TokenRows[Self.dtype, Self.head_dim](k, gate)
        self.ape = readable(ape)
        self.steps = DecodeRows[Self.next_n](positions, slot_idx)
        self.rows = rows

    @inline(.always)
    def members(
        self, row: Int, step: DecodeStep, pool: Int
    ) -> PendingPool[Self.dtype, Self.head_dim, Self.kpool]:
        """Locates the members of a pool that this row completes.

        Args:
            row: Batch row.
            step: The row's plan.
            pool: Pool id.

        Returns:
            The members.
        """
        var rows = Array[Int, Self.kpool](fill=0)
        # Too old for this call, where it can complete one pool only.
        comptime in_ring = max(
            Self.kpool - Self.next_n, 0
        ) if Self.MAX_CLOSED == 1 else 0
        comptime for member in range(in_ring, Self.kpool):
            var position = pool * Self.kpool + member
            var token = step.first_token + position - step.first_position
            if not step.gapless and position >= step.first_position:
                while self.steps.position(row, token) != position:
                    token += 1
            rows[member] = row * Self.next_n + token
        return PendingPool[Self.dtype, Self.head_dim, Self.kpool].__init__[
            in_ring=in_ring
        ](
            self.tail,
            step.slot,
            self.tokens,
            pool,
            step.first_position,
            rows,
        )

    @inline(.always)
    def update_channels[
        lanes: Lanes, copy_width: Int, channels: Int
    ](
        self,
        row: Int,
        step: DecodeStep,
        ape: ReadPointer[DType.float32],
        first_channel: Int,
    ):
        """The row body: `channels` channels of one row, from reads to stores.

        Pools that the row completes are closed first and its tokens stashed
        afterwards. Channels never meet, so they may run in any order. Unused
        columns of `pooled` become zero; `closed_pool` is written with channel
        0.

        Parameters:
            lanes: Channels to pool at a time, and their order.
            copy_width: Channels to copy at a time.
            channels: Channels, a multiple of both.

        Args:
            row: Batch row.
            step: The row's plan.
            ape: The position embedding, in the order of the lanes.
            first_channel: First channel.
        """
        var sound = step.is_sound(self.tail.max_slots)
        var closing = 0
        var first_pool = step.first_position // Self.kpool
        if sound:
            closing = (
                step.first_position + step.count
            ) // Self.kpool - first_pool
        for column in range(Self.MAX_CLOSED):
            var cell = row * Self.MAX_CLOSED + column
            var pool = -1
            if column < closing:
                pool = first_pool + column
                pool_channels[lanes, channels](
                    self.members(row, step, pool),
                    ape,
                    self.pooled,
                    cell,
                    first_channel,
                )
            else:
                store_zero[copy_width, channels](
                    self.pooled, cell * Self.head_dim + first_channel
                )
            if first_channel == 0:
                store[width=1](self.closed_pool, cell, Int32(pool))
        if not sound:
            return
        # In order, so that with more tokens than entries the newest one stays.
        comptime for token in range(Self.next_n):
            var position = self.steps.position(row, token)
            if position >= 0:
                self.tail.stash[copy_width, channels](
                    step.slot,
                    position,
                    self.tokens,
                    row * Self.next_n + token,
                    first_channel,
                )

    def check(self) raises:
        """Refuses a bad batch before anything is written.

        Raises:
            Error: Naming the row and the value, if a row with real tokens has
                a slot outside the ring, shares its slot with another such row,
                or has positions that are not consecutive.
        """
        var owners = SlotOwners(
            Self.OP, "slot_idx", "row's with real tokens", self.tail.max_slots
        )
        for row in range(self.rows):
            var step = self.steps.plan(row)
            if step.count == 0:
                continue
            if step.misplaced_token >= 0:
                raise Error(
                    Self.OP,
                    ": positions[",
                    row,
                    "] must be consecutive from ",
                    step.first_position,
                    ", got ",
                    self.steps.position(row, step.misplaced_token),
                    " at token ",
                    step.misplaced_token,
                )
            owners.claim(row, step.slot)

    def tasks(self) -> Int:
        """Counts the units that CPU threads share: batch rows.

        Returns:
            Tasks.
        """
        return self.rows

    def elements_per_task(self) -> Int:
        """Weighs one row.

        Returns:
            Elements that it reads at most.
        """
        return (Self.next_n + Self.kpool) * Self.head_dim

    def run_tasks(self, first: Int, last: Int):
        """Updates some batch rows on the CPU.

        Args:
            first: First row.
            last: Row after the last one.
        """
        comptime LANES = cpu_lanes[Self.dtype, Self.head_dim]()
        comptime COPY_WIDTH = cpu_copy_width[Self.dtype, Self.head_dim]()
        var ape = LaneTable[LANES](self.ape, Self.kpool * Self.head_dim)
        for row in range(first, last):
            if row + 1 < last:
                var next = self.steps.plan(row + 1)
                self.tail.prefetch[Self.kpool](
                    next.slot,
                    next.first_position,
                    next.first_position + next.count,
                )
            self.update_channels[LANES, COPY_WIDTH, Self.head_dim](
                row, self.steps.plan(row), ape.data, 0
            )
        _ = ape^

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        return self.rows * (Self.head_dim // Self.GPU_LANES.width)

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share: every `threads`-th vector.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid.
        """
        comptime LANES = Self.head_dim // Self.GPU_LANES.width
        for item in range(thread, self.threads(), threads):
            var row = item // LANES
            self.update_channels[
                Self.GPU_LANES, Self.GPU_LANES.width, Self.GPU_LANES.width
            ](
                row,
                self.steps.plan(row),
                self.ape,
                item % LANES * Self.GPU_LANES.width,
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(block_threads[head_dim]())
    )
)
@__name(t"kpool_tail_update_{dtype}_{head_dim}_{kpool}_{next_n}")
def kpool_tail_update_kernel[
    dtype: DType,
    TailLayoutType: TensorLayout,
    tail_origin: MutOrigin,
    OutLayoutType: TensorLayout,
    out_origin: MutOrigin,
    ClosedLayoutType: TensorLayout,
    closed_origin: MutOrigin,
    KLayoutType: TensorLayout,
    k_origin: ImmOrigin,
    GateLayoutType: TensorLayout,
    gate_origin: ImmOrigin,
    ApeLayoutType: TensorLayout,
    ape_origin: ImmOrigin,
    PosLayoutType: TensorLayout,
    pos_origin: ImmOrigin,
    SlotLayoutType: TensorLayout,
    slot_origin: ImmOrigin,
    head_dim: Int,
    kpool: Int,
    next_n: Int = 1,
](
    tail: TileTensor[dtype, TailLayoutType, tail_origin],
    pooled: TileTensor[dtype, OutLayoutType, out_origin],
    closed_pool: TileTensor[.int32, ClosedLayoutType, closed_origin],
    k: TileTensor[dtype, KLayoutType, k_origin],
    gate: TileTensor[dtype, GateLayoutType, gate_origin],
    ape: TileTensor[.float32, ApeLayoutType, ape_origin],
    positions: TileTensor[.int32, PosLayoutType, pos_origin],
    slot_idx: TileTensor[.uint32, SlotLayoutType, slot_origin],
    num_requests: Int32,
):
    """The GPU kernel, for launches from Mojo with a `DeviceContext`.

    Any one-dimensional grid and any block of at most `block_threads` threads
    will do; one block a row with `head_dim` threads is one of them. Operands
    are dense and 16-byte aligned. A row that is unsound is skipped and closes
    nothing.

    Parameters:
        dtype: Element type of `tail`, `k`, `gate` and `pooled`.
        TailLayoutType: Layout of `tail`.
        tail_origin: Origin of `tail`.
        OutLayoutType: Layout of `pooled`.
        out_origin: Origin of `pooled`.
        ClosedLayoutType: Layout of `closed_pool`.
        closed_origin: Origin of `closed_pool`.
        KLayoutType: Layout of `k`.
        k_origin: Origin of `k`.
        GateLayoutType: Layout of `gate`.
        gate_origin: Origin of `gate`.
        ApeLayoutType: Layout of `ape`.
        ape_origin: Origin of `ape`.
        PosLayoutType: Layout of `positions`.
        pos_origin: Origin of `positions`.
        SlotLayoutType: Layout of `slot_idx`.
        slot_origin: Origin of `slot_idx`.
        head_dim: Channels per key.
        kpool: Tokens per pool.
        next_n: Tokens appended per row.

    Args:
        tail: The ring `[max_slots, 2, ring_len, head_dim]`, updated in place;
            `ring_len` is static.
        pooled: Output `[num_requests, ceil(next_n / kpool), head_dim]`.
        closed_pool: Output `[num_requests, ceil(next_n / kpool)]`.
        k: Keys `[num_requests, next_n, head_dim]`.
        gate: Gate scores `[num_requests, next_n, head_dim]`.
        ape: Within-pool position embedding `[kpool, head_dim]`.
        positions: Absolute positions `[num_requests, next_n]`; negative is
            padding.
        slot_idx: Ring slots `[num_requests]`.
        num_requests: Rows actually present.
    """
    run_grid_thread(
        TailUpdate[
            dtype, head_dim, kpool, next_n, ring_len_of[TailLayoutType, kpool]()
        ](
            tail,
            pooled,
            closed_pool,
            k,
            gate,
            ape,
            positions,
            slot_idx,
            Int(num_requests),
        )
    )
