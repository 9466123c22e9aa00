"""`mo.mla.kpool.ragged_update`: close, compress and stash a ragged step at once."""

from layout import TileTensor

from .launch import KernelCall, block_threads
from .lanes import LaneTable, Lanes, cpu_lanes, gpu_lanes
from .members import PendingPool, WholePool, pool_channels
from .ragged import Chunk, RaggedBatch, check_requests, next_owner_of, owner_of
from .ring import TailRing
from .tokens import PREFETCHED_POOLS, TokenRows
from .vectors import (
    ReadPointer,
    WritePointer,
    cpu_copy_width,
    load,
    readable,
    store,
    store_zero,
    writable,
)


@fieldwise_init
struct OutputRow(TrivialRegisterPassable):
    """What one output row holds."""

    var pool: Int
    """Pool id, or -1."""
    var first_member_row: Int
    """Token row of the pool's first member, where this call brings them all."""
    var is_pending: Bool
    """Whether earlier calls brought some of its members."""


struct RaggedUpdate[dtype: DType, head_dim: Int, kpool: Int, ring_len: Int](
    KernelCall
):
    """One call: its operands, and the body that CPU and GPU both run.

    The units of work are the requests, then the output rows. A request's unit
    closes the pool it had pending and stashes its tokens, in that order, because
    a stash may take the entry of a member. A row's unit reads no ring.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.
        kpool: Tokens per pool.
        ring_len: Entries per slot and plane.
    """

    comptime OP: StaticString = "ragged_update"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[Self.head_dim]()
    """The most threads a GPU block may have."""
    comptime GPU_LANES = gpu_lanes[Self.dtype, Self.head_dim, Self.kpool]()
    """Channels a GPU thread takes."""

    var pooled: WritePointer[Self.dtype]
    """Output `[rows, head_dim]`."""
    var closed_pool: WritePointer[DType.int32]
    """Output `[rows]`."""
    var tail: TailRing[Self.dtype, Self.head_dim, Self.ring_len]
    """The ring, updated in place."""
    var tokens: TokenRows[Self.dtype, Self.head_dim]
    """Keys and gate scores `[total_tokens, head_dim]`."""
    var ape: ReadPointer[DType.float32]
    """Within-pool position embedding `[kpool, head_dim]`."""
    var batch: RaggedBatch
    """Whose the tokens are."""
    var slot_idx: ReadPointer[DType.uint32]
    """Ring slots `[requests]`."""
    var rows: Int
    """Output rows, as many as could be needed."""

    @inline(.always)
    def __init__(
        out self,
        pooled: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
        closed_pool: TileTensor[mut=True, .int32, address_space=.GENERIC, ...],
        tail: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
        k: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        gate: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        ape: TileTensor[mut=False, .float32, address_space=.GENERIC, ...],
        input_row_offsets: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        cache_lengths: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        slot_idx: TileTensor[mut=False, .uint32, address_space=.GENERIC, ...],
        requests: Int,
    ):
        """Takes the op's operands, all dense.

        Args:
            pooled: Output `[rows, head_dim]`.
            closed_pool: Output `[rows]`.
            tail: The ring `[max_slots, 2, ring_len, head_dim]`.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            input_row_offsets: Token row offsets `[requests + 1]`.
            cache_lengths: Tokens cached before this call `[requests]`.
            slot_idx: Ring slots `[requests]`.
            requests: Requests in the batch.
        """
        self.pooled = writable(pooled)
        self.closed_pool = writable(closed_pool)
        self.tail = TailRing[Self.dtype, Self.head_dim, Self.ring_len](tail)
        self.tokens = TokenRows[Self.dtype, Self.head_dim](k, gate)
        self.ape = readable(ape)
        self.batch = RaggedBatch(
            input_row_offsets, cache_lengths, Int(k.dim[0]()), requests
        )
        self.slot_idx = readable(slot_idx)
        self.rows = Int(pooled.dim[0]())

    @inline(.always)
    def first_output_row(self, request: Int) -> Int:
        """Finds where a request's closed pools go.

        Each request has room for the most that it can close, whatever its
        alignment, so this takes no sum over the requests before it.

        Args:
            request: Index in the batch.

        Returns:
            Its first output row.
        """
        var offset = Int(load[1](self.batch.input_row_offsets, request))
        return (offset + request * (Self.kpool - 1)) // Self.kpool

    @inline(.always)
    def is_sound(self, slot: Int, chunk: Chunk) -> Bool:
        """Whether a request may touch the ring. A GPU skips one that may not.

        Args:
            slot: Its slot.
            chunk: Its chunk.

        Returns:
            True if its slot is inside the ring and its rows inside `k`.
        """
        return slot < self.tail.max_slots and self.batch.is_sound(chunk)

    @inline(.always)
    def update_request[
        lanes: Lanes, copy_width: Int, channels: Int
    ](self, request: Int, ape: ReadPointer[DType.float32], first_channel: Int,):
        """The body of a request's unit, for `channels` channels.

        Parameters:
            lanes: Channels to pool at a time, and their order.
            copy_width: Channels to copy at a time.
            channels: Channels, a multiple of both.

        Args:
            request: Index in the batch.
            ape: The position embedding, in the order of the lanes.
            first_channel: First channel.
        """
        var slot = Int(load[1](self.slot_idx, request))
        var chunk = self.batch.chunk(request)
        if not self.is_sound(slot, chunk):
            return
        var row = self.first_output_row(request)
        if chunk.closes_pending[Self.kpool]() and row < self.rows:
            pool_channels[lanes, channels](
                PendingPool[Self.dtype, Self.head_dim, Self.kpool](
                    self.tail, slot, self.tokens, chunk
                ),
                ape,
                self.pooled,
                row,
                first_channel,
            )
            if first_channel == 0:
                var pool = chunk.first_position // Self.kpool
                store[width=1](self.closed_pool, row, Int32(pool))
        var end = chunk.end_position()
        var newest = max(chunk.first_position, end - Self.ring_len)
        self.tail.stash[copy_width, channels](
            slot,
            newest,
            self.tokens,
            chunk.row(newest),
            first_channel,
            end - newest,
        )

    @inline(.always)
    def owner(self, row: Int) -> Int:
        """Finds the request that an output row belongs to.

        Args:
            row: Output row.

        Returns:
            The request, or -1.
        """
        return owner_of[extra=Self.kpool - 1, divisor=Self.kpool](
            self.batch.input_row_offsets, self.batch.requests, row
        )

    @inline(.always)
    def plan_row(self, row: Int, request: Int) -> OutputRow:
        """Finds what an output row holds.

        Args:
            row: Output row.
            request: The request that it belongs to, or -1.

        Returns:
            Its pool and where the members are.
        """
        var plan = OutputRow(pool=-1, first_member_row=0, is_pending=False)
        if request < 0:
            return plan
        var chunk = self.batch.chunk(request)
        var local = row - self.first_output_row(request)
        if local < chunk.closing[Self.kpool]() and self.is_sound(
            Int(load[1](self.slot_idx, request)), chunk
        ):
            plan.pool = chunk.first_position // Self.kpool + local
            plan.first_member_row = chunk.row(plan.pool * Self.kpool)
            plan.is_pending = local == 0 and chunk.closes_pending[Self.kpool]()
        return plan

    @inline(.always)
    def update_row[
        lanes: Lanes, channels: Int
    ](
        self,
        row: Int,
        plan: OutputRow,
        ape: ReadPointer[DType.float32],
        first_channel: Int,
    ):
        """The body of an output row's unit, for `channels` channels.

        Parameters:
            lanes: Channels to pool at a time, and their order.
            channels: Channels, a multiple of the lanes.

        Args:
            row: Output row.
            plan: What it holds; a pending pool is its request's to write.
            ape: The position embedding, in the order of the lanes.
            first_channel: First channel.
        """
        if plan.is_pending:
            return
        if plan.pool >= 0:
            pool_channels[lanes, channels](
                WholePool[Self.dtype, Self.head_dim, Self.kpool](
                    self.tokens, plan.first_member_row
                ),
                ape,
                self.pooled,
                row,
                first_channel,
            )
        else:
            store_zero[lanes.width, channels](
                self.pooled, row * Self.head_dim + first_channel
            )
        if first_channel == 0:
            store[width=1](self.closed_pool, row, Int32(plan.pool))

    def check(self) raises:
        """Refuses a bad batch before anything is written.

        Raises:
            Error: If the row offsets decrease or pass the token count, or if a
                request with tokens has a slot outside the ring or another such
                request's.
        """
        check_requests(Self.OP, self.batch, self.slot_idx, self.tail.max_slots)

    def tasks(self) -> Int:
        """Counts the units: requests, then output rows.

        Returns:
            Tasks.
        """
        return self.batch.requests + self.rows

    def elements_per_task(self) -> Int:
        """Weighs one unit.

        Returns:
            Elements that it reads at most.
        """
        return 2 * max(Self.kpool, Self.ring_len) * Self.head_dim

    def run_tasks(self, first: Int, last: Int):
        """Does some units on the CPU.

        Args:
            first: First unit.
            last: Unit after the last one.
        """
        comptime LANES = cpu_lanes[Self.dtype, Self.head_dim]()
        comptime COPY_WIDTH = cpu_copy_width[Self.dtype, Self.head_dim]()
        var requests = self.batch.requests
        var ape = LaneTable[LANES](self.ape, Self.kpool * Self.head_dim)
        var last_request = min(last, requests)
        for request in range(first, last_request):
            if request + 1 < last_request:
                var next = self.batch.chunk(request + 1)
                self.tail.prefetch[Self.kpool](
                    Int(load[1](self.slot_idx, request + 1)),
                    next.first_position,
                    next.end_position(),
                )
            self.update_request[LANES, COPY_WIDTH, Self.head_dim](
                request, ape.data, 0
            )
        var first_row = max(first - requests, 0)
        var request = self.owner(first_row)
        for row in range(first_row, last - requests):
            request = next_owner_of[extra=Self.kpool - 1, divisor=Self.kpool](
                self.batch.input_row_offsets, requests, row, request
            )
            var plan = self.plan_row(row, request)
            self.tokens.prefetch(
                plan.first_member_row + PREFETCHED_POOLS * Self.kpool,
                Self.kpool,
            )
            self.update_row[LANES, Self.head_dim](row, plan, ape.data, 0)
        _ = ape^

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        return self.tasks() * (Self.head_dim // Self.GPU_LANES.width)

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share: every `threads`-th vector.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid.
        """
        comptime LANES = Self.head_dim // Self.GPU_LANES.width
        for item in range(thread, self.threads(), threads):
            var channel = item % LANES * Self.GPU_LANES.width
            var row = item // LANES - self.batch.requests
            if row < 0:
                self.update_request[
                    Self.GPU_LANES, Self.GPU_LANES.width, Self.GPU_LANES.width
                ](item // LANES, self.ape, channel)
            else:
                self.update_row[Self.GPU_LANES, Self.GPU_LANES.width](
                    row, self.plan_row(row, self.owner(row)), self.ape, channel
                )
