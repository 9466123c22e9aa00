"""`mo.mla.kpool.seed_tail`: prefill leaves its trailing tokens in the ring."""

from std.utils.static_tuple import StaticTuple
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA

from .launch import KernelCall, block_threads, run_grid_thread
from .ragged import Chunk, RaggedBatch, check_requests
from .ring import TailRing, ring_len_of
from .tokens import TokenRows
from .vectors import (
    ReadPointer,
    cpu_copy_width,
    gpu_vector_width,
    load,
    readable,
)


struct SeedTail[dtype: DType, head_dim: Int, kpool: Int, ring_len: Int](
    KernelCall
):
    """One call: its operands, and the body that CPU and GPU both run.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.
        kpool: Tokens per pool.
        ring_len: Entries per slot and plane.
    """

    comptime OP: StaticString = "seed_tail"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[Self.head_dim]()
    """The most threads a GPU block may have."""
    # A thread holds one token, not the members of a pool.
    comptime GPU_WIDTH = gpu_vector_width[Self.dtype, Self.head_dim, 1]()
    """Channels a GPU thread takes."""
    comptime MAX_TAIL = Self.kpool - 1
    """The most tokens a request leaves behind."""

    var tail: TailRing[Self.dtype, Self.head_dim, Self.ring_len]
    """The ring, updated in place."""
    var tokens: TokenRows[Self.dtype, Self.head_dim]
    """Keys and gate scores `[total_tokens, head_dim]`."""
    var batch: RaggedBatch
    """Whose the tokens are."""
    var slot_idx: ReadPointer[DType.uint32]
    """Ring slots `[requests]`."""

    @inline(.always)
    def __init__(
        out self,
        tail: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
        k: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        gate: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
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
            tail: The ring `[max_slots, 2, ring_len, head_dim]`.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            input_row_offsets: Token row offsets `[requests + 1]`.
            cache_lengths: Tokens cached before this call `[requests]`.
            slot_idx: Ring slots `[requests]`.
            requests: Requests in the batch.
        """
        self.tail = TailRing[Self.dtype, Self.head_dim, Self.ring_len](tail)
        self.tokens = TokenRows[Self.dtype, Self.head_dim](k, gate)
        self.batch = RaggedBatch(
            input_row_offsets, cache_lengths, Int(k.dim[0]()), requests
        )
        self.slot_idx = readable(slot_idx)

    @inline(.always)
    def seed_channels[
        width: Int, channels: Int
    ](self, slot: Int, chunk: Chunk, member: Int, first_channel: Int):
        """The row body: `channels` channels of one token that stays behind.

        Parameters:
            width: Channels to copy at a time.
            channels: Channels, a multiple of `width`.

        Args:
            slot: The request's slot.
            chunk: The request's chunk.
            member: Which of its trailing tokens, from 0; one that it does not
                have is skipped, and so is a request that is unsound.
            first_channel: First channel.
        """
        var end = chunk.end_position()
        var position = member + max(
            end // Self.kpool * Self.kpool, chunk.first_position
        )
        if (
            position < end
            and slot < self.tail.max_slots
            and self.batch.is_sound(chunk)
        ):
            self.tail.stash[width, channels](
                slot, position, self.tokens, chunk.row(position), first_channel
            )

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
        return 2 * Self.MAX_TAIL * Self.head_dim

    def run_tasks(self, first: Int, last: Int):
        """Seeds some requests on the CPU.

        Args:
            first: First request.
            last: Request after the last one.
        """
        comptime WIDTH = cpu_copy_width[Self.dtype, Self.head_dim]()
        for request in range(first, last):
            var slot = Int(load[1](self.slot_idx, request))
            var chunk = self.batch.chunk(request)
            for member in range(min(chunk.count(), Self.MAX_TAIL)):
                self.seed_channels[WIDTH, Self.head_dim](slot, chunk, member, 0)

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        comptime LANES = Self.head_dim // Self.GPU_WIDTH
        return self.batch.requests * Self.MAX_TAIL * LANES

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share: every `threads`-th vector.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid.
        """
        comptime LANES = Self.head_dim // Self.GPU_WIDTH
        for item in range(thread, self.threads(), threads):
            var request = item // LANES // Self.MAX_TAIL
            self.seed_channels[Self.GPU_WIDTH, Self.GPU_WIDTH](
                Int(load[1](self.slot_idx, request)),
                self.batch.chunk(request),
                item // LANES % Self.MAX_TAIL,
                item % LANES * Self.GPU_WIDTH,
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(block_threads[head_dim]())
    )
)
@__name(t"kpool_seed_tail_{dtype}_{head_dim}_{kpool}")
def kpool_seed_tail_kernel[
    dtype: DType,
    TailLayoutType: TensorLayout,
    tail_origin: MutOrigin,
    KLayoutType: TensorLayout,
    k_origin: ImmOrigin,
    GateLayoutType: TensorLayout,
    gate_origin: ImmOrigin,
    IROLayoutType: TensorLayout,
    iro_origin: ImmOrigin,
    CacheLenLayoutType: TensorLayout,
    cache_len_origin: ImmOrigin,
    SlotLayoutType: TensorLayout,
    slot_origin: ImmOrigin,
    head_dim: Int,
    kpool: Int,
](
    tail: TileTensor[dtype, TailLayoutType, tail_origin],
    k: TileTensor[dtype, KLayoutType, k_origin],
    gate: TileTensor[dtype, GateLayoutType, gate_origin],
    input_row_offsets: TileTensor[.uint32, IROLayoutType, iro_origin],
    cache_lengths: TileTensor[.uint32, CacheLenLayoutType, cache_len_origin],
    slot_idx: TileTensor[.uint32, SlotLayoutType, slot_origin],
    num_requests: Int32,
):
    """The GPU kernel, for launches from Mojo with a `DeviceContext`.

    Any one-dimensional grid and any block of at most `block_threads` threads
    will do. Operands are dense and 16-byte aligned. A request that is unsound
    is skipped.

    Parameters:
        dtype: Element type of `tail`, `k` and `gate`.
        TailLayoutType: Layout of `tail`.
        tail_origin: Origin of `tail`.
        KLayoutType: Layout of `k`.
        k_origin: Origin of `k`.
        GateLayoutType: Layout of `gate`.
        gate_origin: Origin of `gate`.
        IROLayoutType: Layout of `input_row_offsets`.
        iro_origin: Origin of `input_row_offsets`.
        CacheLenLayoutType: Layout of `cache_lengths`.
        cache_len_origin: Origin of `cache_lengths`.
        SlotLayoutType: Layout of `slot_idx`.
        slot_origin: Origin of `slot_idx`.
        head_dim: Channels per key.
        kpool: Tokens per pool.

    Args:
        tail: The ring `[max_slots, 2, ring_len, head_dim]`, updated in place;
            `ring_len` is static.
        k: Keys `[total_tokens, head_dim]`.
        gate: Gate scores `[total_tokens, head_dim]`.
        input_row_offsets: Token row offsets `[num_requests + 1]`.
        cache_lengths: Tokens cached before this call `[num_requests]`.
        slot_idx: Ring slots `[num_requests]`.
        num_requests: Requests actually present.
    """
    run_grid_thread(
        SeedTail[dtype, head_dim, kpool, ring_len_of[TailLayoutType, kpool]()](
            tail,
            k,
            gate,
            input_row_offsets,
            cache_lengths,
            slot_idx,
            Int(num_requests),
        )
    )
