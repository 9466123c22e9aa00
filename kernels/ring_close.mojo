"""`mo.mla.kpool.ring_close`: a chunk completes the pool its request had pending."""

from std.utils.static_tuple import StaticTuple
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA

from .launch import KernelCall, block_threads, run_grid_thread
from .lanes import LaneTable, Lanes, cpu_lanes, gpu_lanes
from .members import PendingPool, pool_channels
from .ragged import RaggedBatch, check_requests
from .ring import TailRing, ring_len_of
from .tokens import TokenRows
from .vectors import (
    ReadPointer,
    WritePointer,
    load,
    readable,
    store,
    store_zero,
    writable,
)


struct RingClose[dtype: DType, head_dim: Int, kpool: Int, ring_len: Int](
    KernelCall
):
    """One call: its operands, and the body that CPU and GPU both run.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.
        kpool: Tokens per pool.
        ring_len: Entries per slot and plane.
    """

    comptime OP: StaticString = "ring_close"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[Self.head_dim]()
    """The most threads a GPU block may have."""
    comptime GPU_LANES = gpu_lanes[Self.dtype, Self.head_dim, Self.kpool]()
    """Channels a GPU thread takes."""

    var pooled: WritePointer[Self.dtype]
    """Output `[requests, head_dim]`."""
    var closed_pool: WritePointer[DType.int32]
    """Output `[requests]`."""
    var tail: TailRing[Self.dtype, Self.head_dim, Self.ring_len]
    """The ring, only read."""
    var tokens: TokenRows[Self.dtype, Self.head_dim]
    """Keys and gate scores `[total_tokens, head_dim]`."""
    var ape: ReadPointer[DType.float32]
    """Within-pool position embedding `[kpool, head_dim]`."""
    var batch: RaggedBatch
    """Whose the tokens are."""
    var slot_idx: ReadPointer[DType.uint32]
    """Ring slots `[requests]`."""

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
            pooled: Output `[requests, head_dim]`.
            closed_pool: Output `[requests]`.
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

    @inline(.always)
    def close_channels[
        lanes: Lanes, channels: Int
    ](self, request: Int, ape: ReadPointer[DType.float32], first_channel: Int,):
        """The row body: `channels` channels of one request.

        Parameters:
            lanes: Channels to pool at a time, and their order.
            channels: Channels, a multiple of the lanes.

        Args:
            request: Index in the batch. One that completes no pending pool, or
                is unsound, gets zero and -1.
            ape: The position embedding, in the order of the lanes.
            first_channel: First channel.
        """
        var slot = Int(load[1](self.slot_idx, request))
        var chunk = self.batch.chunk(request)
        var pool = -1
        if (
            slot < self.tail.max_slots
            and self.batch.is_sound(chunk)
            and chunk.closes_pending[Self.kpool]()
        ):
            pool = chunk.first_position // Self.kpool
            pool_channels[lanes, channels](
                PendingPool[Self.dtype, Self.head_dim, Self.kpool](
                    self.tail, slot, self.tokens, chunk
                ),
                ape,
                self.pooled,
                request,
                first_channel,
            )
        else:
            store_zero[lanes.width, channels](
                self.pooled, request * Self.head_dim + first_channel
            )
        if first_channel == 0:
            store[width=1](self.closed_pool, request, Int32(pool))

    def check(self) raises:
        """Refuses a bad batch before anything is written.

        Raises:
            Error: If the row offsets decrease or pass the token count, or if a
                request with tokens has a slot outside the ring or another such
                request's.
        """
        check_requests(Self.OP, self.batch, self.slot_idx, self.tail.max_slots)

    def tasks(self) -> Int:
        """Counts the units that CPU threads share: requests.

        Returns:
            Tasks.
        """
        return self.batch.requests

    def elements_per_task(self) -> Int:
        """Weighs one request.

        Returns:
            Elements that it reads at most.
        """
        return 2 * Self.kpool * Self.head_dim

    def run_tasks(self, first: Int, last: Int):
        """Closes some requests' pools on the CPU.

        Args:
            first: First request.
            last: Request after the last one.
        """
        comptime LANES = cpu_lanes[Self.dtype, Self.head_dim]()
        var ape = LaneTable[LANES](self.ape, Self.kpool * Self.head_dim)
        for request in range(first, last):
            self.close_channels[LANES, Self.head_dim](request, ape.data, 0)
        _ = ape^

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        return self.batch.requests * (Self.head_dim // Self.GPU_LANES.width)

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share: every `threads`-th vector.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid.
        """
        comptime LANES = Self.head_dim // Self.GPU_LANES.width
        for item in range(thread, self.threads(), threads):
            self.close_channels[Self.GPU_LANES, Self.GPU_LANES.width](
                item // LANES, self.ape, item % LANES * Self.GPU_LANES.width
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(block_threads[head_dim]())
    )
)
@__name(t"kpool_ring_close_{dtype}_{head_dim}_{kpool}")
def kpool_ring_close_kernel[
    dtype: DType,
    OutLayoutType: TensorLayout,
    out_origin: MutOrigin,
    ClosedLayoutType: TensorLayout,
    closed_origin: MutOrigin,
    TailLayoutType: TensorLayout,
    tail_origin: MutOrigin,
    KLayoutType: TensorLayout,
    k_origin: ImmOrigin,
    GateLayoutType: TensorLayout,
    gate_origin: ImmOrigin,
    ApeLayoutType: TensorLayout,
    ape_origin: ImmOrigin,
    IROLayoutType: TensorLayout,
    iro_origin: ImmOrigin,
    CacheLenLayoutType: TensorLayout,
    cache_len_origin: ImmOrigin,
    SlotLayoutType: TensorLayout,
    slot_origin: ImmOrigin,
    head_dim: Int,
    kpool: Int,
](
    pooled: TileTensor[dtype, OutLayoutType, out_origin],
    closed_pool: TileTensor[.int32, ClosedLayoutType, closed_origin],
    tail: TileTensor[dtype, TailLayoutType, tail_origin],
    k: TileTensor[dtype, KLayoutType, k_origin],
    gate: TileTensor[dtype, GateLayoutType, gate_origin],
    ape: TileTensor[.float32, ApeLayoutType, ape_origin],
    input_row_offsets: TileTensor[.uint32, IROLayoutType, iro_origin],
    cache_lengths: TileTensor[.uint32, CacheLenLayoutType, cache_len_origin],
    slot_idx: TileTensor[.uint32, SlotLayoutType, slot_origin],
    num_requests: Int32,
):
    """The GPU kernel, for launches from Mojo with a `DeviceContext`.

    Any one-dimensional grid and any block of at most `block_threads` threads
    will do. Operands are dense and 16-byte aligned. A request that is unsound
    closes nothing.

    Parameters:
        dtype: Element type of `tail`, `k`, `gate` and `pooled`.
        OutLayoutType: Layout of `pooled`.
        out_origin: Origin of `pooled`.
        ClosedLayoutType: Layout of `closed_pool`.
        closed_origin: Origin of `closed_pool`.
        TailLayoutType: Layout of `tail`.
        tail_origin: Origin of `tail`.
        KLayoutType: Layout of `k`.
        k_origin: Origin of `k`.
        GateLayoutType: Layout of `gate`.
        gate_origin: Origin of `gate`.
        ApeLayoutType: Layout of `ape`.
        ape_origin: Origin of `ape`.
        IROLayoutType: Layout of `input_row_offsets`.
        iro_origin: Origin of `input_row_offsets`.
        CacheLenLayoutType: Layout of `cache_lengths`.
        cache_len_origin: Origin of `cache_lengths`.
        SlotLayoutType: Layout of `slot_idx`.
        slot_origin: Origin of `slot_idx`.
        head_dim: Channels per key.
        kpool: Tokens per pool.

    Args:
        pooled: Output `[num_requests, head_dim]`.
        closed_pool: Output `[num_requests]`.
        tail: The ring `[max_slots, 2, ring_len, head_dim]`, only read.
        k: Keys `[total_tokens, head_dim]`.
        gate: Gate scores `[total_tokens, head_dim]`.
        ape: Within-pool position embedding `[kpool, head_dim]`.
        input_row_offsets: Token row offsets `[num_requests + 1]`.
        cache_lengths: Tokens cached before this call `[num_requests]`.
        slot_idx: Ring slots `[num_requests]`.
        num_requests: Requests actually present.
    """
    run_grid_thread(
        RingClose[dtype, head_dim, kpool, ring_len_of[TailLayoutType, kpool]()](
            pooled,
            closed_pool,
            tail,
            k,
            gate,
            ape,
            input_row_offsets,
            cache_lengths,
            slot_idx,
            Int(num_requests),
        )
    )
