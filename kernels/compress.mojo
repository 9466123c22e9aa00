"""`mo.mla.kpool.compress`: pools whose members all arrive in this call."""

from std.math import ceildiv
from std.utils.static_tuple import StaticTuple
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA

from .launch import KernelCall, block_threads, run_grid_thread
from .lanes import LaneTable, Lanes, cpu_lanes, gpu_lanes
from .members import WholePool, pool_channels
from .ragged import Chunk, RaggedBatch, next_owner_of, owner_of
from .tokens import PREFETCHED_POOLS, TokenRows
from .vectors import (
    ReadPointer,
    WritePointer,
    load,
    readable,
    store_zero,
    writable,
)


struct Compress[dtype: DType, head_dim: Int, kpool: Int](KernelCall):
    """One call: its operands, and the body that CPU and GPU both run.

    Parameters:
        dtype: Element type of keys and gate scores.
        head_dim: Channels per key.
        kpool: Tokens per pool.
    """

    comptime OP: StaticString = "compress"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[Self.head_dim]()
    """The most threads a GPU block may have."""
    comptime GPU_LANES = gpu_lanes[Self.dtype, Self.head_dim, Self.kpool]()
    """Channels a GPU thread takes."""

    var pooled: WritePointer[Self.dtype]
    """Output `[rows, head_dim]`."""
    var tokens: TokenRows[Self.dtype, Self.head_dim]
    """Keys and gate scores `[total_tokens, head_dim]`."""
    var ape: ReadPointer[DType.float32]
    """Within-pool position embedding `[kpool, head_dim]`."""
    var batch: RaggedBatch
    """Whose the tokens are."""
    var pool_row_offsets: ReadPointer[DType.uint32]
    """First output row of each request `[requests + 1]`."""
    var rows: Int
    """Output rows, as many as could be needed."""

    @inline(.always)
    def __init__(
        out self,
        pooled: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
        k: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        gate: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        ape: TileTensor[mut=False, .float32, address_space=.GENERIC, ...],
        input_row_offsets: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        pool_row_offsets: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        cache_lengths: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        requests: Int,
    ):
        """Takes the op's operands, all dense.

        Args:
            pooled: Output `[rows, head_dim]`.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            input_row_offsets: Token row offsets `[requests + 1]`.
            pool_row_offsets: Output row offsets `[requests + 1]`.
            cache_lengths: Tokens cached before this call `[requests]`.
            requests: Requests in the batch.
        """
        self.pooled = writable(pooled)
        self.tokens = TokenRows[Self.dtype, Self.head_dim](k, gate)
        self.ape = readable(ape)
        self.batch = RaggedBatch(
            input_row_offsets, cache_lengths, Int(k.dim[0]()), requests
        )
        self.pool_row_offsets = readable(pool_row_offsets)
        self.rows = Int(pooled.dim[0]())

    @inline(.always)
    def whole_pools(self, chunk: Chunk) -> Int:
        """Counts the pools whose members a chunk brings all of.

        Args:
            chunk: A request's chunk.

        Returns:
            Pools.
        """
        return chunk.closing[Self.kpool]() - Int(
            chunk.closes_pending[Self.kpool]()
        )

    @inline(.always)
    def owner(self, row: Int) -> Int:
        """Finds the request that an output row belongs to.

        Args:
            row: Output row.

        Returns:
            The request, or -1.
        """
        return owner_of(self.pool_row_offsets, self.batch.requests, row)

    @inline(.always)
    def first_member_row(self, row: Int, request: Int) -> Int:
        """Finds the tokens that an output row pools.

        Args:
            row: Output row.
            request: The request that it belongs to, or -1.

        Returns:
            Token row of the pool's first member, or -1 if no pool goes here.
        """
        if request < 0:
            return -1
        var chunk = self.batch.chunk(request)
        var local = row - Int(load[1](self.pool_row_offsets, request))
        if not self.batch.is_sound(chunk) or local >= self.whole_pools(chunk):
            return -1
        var first_pool = ceildiv(chunk.first_position, Self.kpool)
        return chunk.row((first_pool + local) * Self.kpool)

    @inline(.always)
    def compress_channels[
        lanes: Lanes, channels: Int
    ](
        self,
        row: Int,
        first_member_row: Int,
        ape: ReadPointer[DType.float32],
        first_channel: Int,
    ):
        """The row body: `channels` channels of one output row.

        Parameters:
            lanes: Channels to pool at a time, and their order.
            channels: Channels, a multiple of the lanes.

        Args:
            row: Output row; it becomes zero if no pool goes there.
            first_member_row: What `first_member_row` returns for it.
            ape: The position embedding, in the order of the lanes.
            first_channel: First channel.
        """
        if first_member_row >= 0:
            pool_channels[lanes, channels](
                WholePool[Self.dtype, Self.head_dim, Self.kpool](
                    self.tokens, first_member_row
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

    def check(self) raises:
        """Refuses a bad batch before anything is written.

        Raises:
            Error: If the row offsets decrease or pass the token count, or if
                the pool row offsets are not the sums of the pools completed.
        """
        var wanted = 0
        for request in range(self.batch.requests + 1):
            var got = Int(load[1](self.pool_row_offsets, request))
            if got != wanted:
                raise Error(
                    Self.OP,
                    ": pool_row_offsets[",
                    request,
                    "] must be ",
                    wanted,
                    ", the whole pools of the requests before it, got ",
                    got,
                )
            if request < self.batch.requests:
                self.batch.check(Self.OP, request)
                wanted += self.whole_pools(self.batch.chunk(request))

    def tasks(self) -> Int:
        """Counts the units that CPU threads share: output rows.

        Returns:
            Tasks.
        """
        return self.rows

    def elements_per_task(self) -> Int:
        """Weighs one output row.

        Returns:
            Elements that it reads at most.
        """
        return 2 * Self.kpool * Self.head_dim

    def run_tasks(self, first: Int, last: Int):
        """Pools some output rows on the CPU.

        Args:
            first: First row.
            last: Row after the last one.
        """
        comptime LANES = cpu_lanes[Self.dtype, Self.head_dim]()
        var ape = LaneTable[LANES](self.ape, Self.kpool * Self.head_dim)
        var request = self.owner(first)
        for row in range(first, last):
            request = next_owner_of(
                self.pool_row_offsets, self.batch.requests, row, request
            )
            var first_member_row = self.first_member_row(row, request)
            self.tokens.prefetch(
                first_member_row + PREFETCHED_POOLS * Self.kpool, Self.kpool
            )
            self.compress_channels[LANES, Self.head_dim](
                row, first_member_row, ape.data, 0
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
            self.compress_channels[Self.GPU_LANES, Self.GPU_LANES.width](
                row,
                self.first_member_row(row, self.owner(row)),
                self.ape,
                item % LANES * Self.GPU_LANES.width,
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(block_threads[head_dim]())
    )
)
@__name(t"kpool_compress_{dtype}_{head_dim}_{kpool}")
def kpool_compress_kernel[
    dtype: DType,
    KLayoutType: TensorLayout,
    k_origin: ImmOrigin,
    GateLayoutType: TensorLayout,
    gate_origin: ImmOrigin,
    ApeLayoutType: TensorLayout,
    ape_origin: ImmOrigin,
    IROLayoutType: TensorLayout,
    iro_origin: ImmOrigin,
    PROLayoutType: TensorLayout,
    pro_origin: ImmOrigin,
    CacheLenLayoutType: TensorLayout,
    cache_len_origin: ImmOrigin,
    OutLayoutType: TensorLayout,
    out_origin: MutOrigin,
    head_dim: Int,
    kpool: Int,
](
    pooled: TileTensor[dtype, OutLayoutType, out_origin],
    k: TileTensor[dtype, KLayoutType, k_origin],
    gate: TileTensor[dtype, GateLayoutType, gate_origin],
    ape: TileTensor[.float32, ApeLayoutType, ape_origin],
    input_row_offsets: TileTensor[.uint32, IROLayoutType, iro_origin],
    pool_row_offsets: TileTensor[.uint32, PROLayoutType, pro_origin],
    cache_lengths: TileTensor[.uint32, CacheLenLayoutType, cache_len_origin],
):
    """The GPU kernel, for launches from Mojo with a `DeviceContext`.

    Any one-dimensional grid and any block of at most `block_threads` threads
    will do. Operands are dense and 16-byte aligned.

    Parameters:
        dtype: Element type of `k`, `gate` and `pooled`.
        KLayoutType: Layout of `k`.
        k_origin: Origin of `k`.
        GateLayoutType: Layout of `gate`.
        gate_origin: Origin of `gate`.
        ApeLayoutType: Layout of `ape`.
        ape_origin: Origin of `ape`.
        IROLayoutType: Layout of `input_row_offsets`.
        iro_origin: Origin of `input_row_offsets`.
        PROLayoutType: Layout of `pool_row_offsets`.
        pro_origin: Origin of `pool_row_offsets`.
        CacheLenLayoutType: Layout of `cache_lengths`.
        cache_len_origin: Origin of `cache_lengths`.
        OutLayoutType: Layout of `pooled`.
        out_origin: Origin of `pooled`.
        head_dim: Channels per key.
        kpool: Tokens per pool.

    Args:
        pooled: Output `[rows, head_dim]`; rows past the last pool become zero.
        k: Keys `[total_tokens, head_dim]`.
        gate: Gate scores `[total_tokens, head_dim]`.
        ape: Within-pool position embedding `[kpool, head_dim]`.
        input_row_offsets: Token row offsets `[batch + 1]`.
        pool_row_offsets: Output row offsets `[batch + 1]`.
        cache_lengths: Tokens cached before this call `[batch]`.
    """
    run_grid_thread(
        Compress[dtype, head_dim, kpool](
            pooled,
            k,
            gate,
            ape,
            input_row_offsets,
            pool_row_offsets,
            cache_lengths,
            Int(cache_lengths.dim[0]()),
        )
    )
