"""`mo.mla.kpool.expand_topk`: selected pools to the positions they cover."""

from std.math import ceildiv
from std.utils.static_tuple import StaticTuple
from layout import TensorLayout, TileTensor
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA

from .launch import KernelCall, block_threads, run_grid_thread
from .ragged import RaggedBatch, owner_of
from .vectors import ReadPointer, WritePointer, load, readable, store, writable

# Ids a GPU thread expands. Each thread counts the whole row's ids, so more
# threads a row read more in all.
comptime _IDS_PER_THREAD = 16


struct ExpandTopk[kpool: Int, pool_topk: Int, always_select_tail: Bool](
    KernelCall
):
    """One call: its operands, and the body that CPU and GPU both run.

    Parameters:
        kpool: Tokens per pool.
        pool_topk: Selected pools per query.
        always_select_tail: Whether the newest positions, which no complete pool
            covers, are selected too.
    """

    comptime OP: StaticString = "expand_topk"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[1]()
    """The most threads a GPU block may have."""
    comptime SEGMENTS = max(ceildiv(Self.pool_topk, _IDS_PER_THREAD), 1)
    """GPU threads a row."""
    comptime COLUMNS = Self.pool_topk * Self.kpool + (
        Self.kpool - 1 if Self.always_select_tail else 0
    )
    """Columns of the output."""

    var selected: WritePointer[DType.int32]
    """Output `[total_tokens, COLUMNS]`."""
    var pool_ids: ReadPointer[DType.int32]
    """Selected pools `[total_tokens, pool_topk]`."""
    var batch: RaggedBatch
    """Whose the queries are."""

    @inline(.always)
    def __init__(
        out self,
        selected: TileTensor[mut=True, .int32, address_space=.GENERIC, ...],
        pool_ids: TileTensor[mut=False, .int32, address_space=.GENERIC, ...],
        input_row_offsets: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        cache_lengths: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        requests: Int,
    ):
        """Takes the op's operands, all dense.

        Args:
            selected: Output `[total_tokens, COLUMNS]`.
            pool_ids: Selected pools `[total_tokens, pool_topk]`.
            input_row_offsets: Token row offsets `[requests + 1]`.
            cache_lengths: Tokens cached before this call `[requests]`.
            requests: Requests in the batch.
        """
        self.selected = writable(selected)
        self.pool_ids = readable(pool_ids)
        self.batch = RaggedBatch(
            input_row_offsets, cache_lengths, Int(pool_ids.dim[0]()), requests
        )

    @inline(.always)
    def visible(self, row: Int) -> Int:
        """Counts the tokens that a query sees, itself included.

        Args:
            row: Token row of the query.

        Returns:
            Tokens; 0 if the row is no request's.
        """
        var request = owner_of(
            self.batch.input_row_offsets, self.batch.requests, row
        )
        if request < 0:
            return 0
        var chunk = self.batch.chunk(request)
        if not self.batch.is_sound(chunk) or row >= chunk.last_row:
            return 0
        return chunk.first_position + row - chunk.first_row + 1

    @inline(.always)
    def expand[segments: Int](self, row: Int, segment: Int):
        """The row body: one of `segments` equal shares of one query's row.

        Every share counts the row's valid ids, so that each knows its place in
        the packed row without waiting for another.

        Parameters:
            segments: Shares per row.

        Args:
            row: Token row of the query.
            segment: Which share.
        """
        comptime IDS = ceildiv(Self.pool_topk, segments)
        comptime SHARE = ceildiv(Self.COLUMNS, segments)
        var visible = self.visible(row)
        var complete = visible // Self.kpool
        var column = row * Self.COLUMNS
        var used = 0
        for i in range(Self.pool_topk):
            var pool = Int(load[1](self.pool_ids, row * Self.pool_topk + i))
            if pool < 0 or pool >= complete:
                continue
            if segment * IDS <= i < (segment + 1) * IDS:
                comptime for member in range(Self.kpool):
                    store[width=1](
                        self.selected,
                        column + used + member,
                        Int32(pool * Self.kpool + member),
                    )
            used += Self.kpool
        comptime if Self.always_select_tail:
            if segment == 0:
                for position in range(complete * Self.kpool, visible):
                    store[width=1](
                        self.selected,
                        column + used + position % Self.kpool,
                        Int32(position),
                    )
            used += visible % Self.kpool
        for i in range(
            max(used, segment * SHARE), min((segment + 1) * SHARE, Self.COLUMNS)
        ):
            store[width=1](self.selected, column + i, Int32(-1))

    def check(self) raises:
        """Refuses a bad batch before anything is written.

        Raises:
            Error: If the row offsets decrease or pass the token count.
        """
        for request in range(self.batch.requests):
            self.batch.check(Self.OP, request)

    def tasks(self) -> Int:
        """Counts the units that CPU threads share: queries.

        Returns:
            Tasks.
        """
        return self.batch.total_tokens

    def elements_per_task(self) -> Int:
        """Weighs one query.

        Returns:
            Elements that it reads and writes at most.
        """
        return Self.pool_topk + Self.COLUMNS

    def run_tasks(self, first: Int, last: Int):
        """Expands some queries' selections on the CPU.

        Args:
            first: First token row.
            last: Token row after the last one.
        """
        for row in range(first, last):
            self.expand[1](row, 0)

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        return self.batch.total_tokens * Self.SEGMENTS

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share: every `threads`-th segment.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid.
        """
        for item in range(thread, self.threads(), threads):
            self.expand[Self.SEGMENTS](
                item // Self.SEGMENTS, item % Self.SEGMENTS
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(block_threads[1]())
    )
)
@__name(t"kpool_expand_topk_{kpool}_{pool_topk}")
def kpool_expand_topk_kernel[
    OutLayoutType: TensorLayout,
    out_origin: MutOrigin,
    IdsLayoutType: TensorLayout,
    ids_origin: ImmOrigin,
    IROLayoutType: TensorLayout,
    iro_origin: ImmOrigin,
    CacheLenLayoutType: TensorLayout,
    cache_len_origin: ImmOrigin,
    kpool: Int,
    pool_topk: Int,
    always_select_tail: Bool = True,
](
    selected: TileTensor[.int32, OutLayoutType, out_origin],
    pool_ids: TileTensor[.int32, IdsLayoutType, ids_origin],
    input_row_offsets: TileTensor[.uint32, IROLayoutType, iro_origin],
    cache_lengths: TileTensor[.uint32, CacheLenLayoutType, cache_len_origin],
):
    """The GPU kernel, for launches from Mojo with a `DeviceContext`.

    Any one-dimensional grid and any block of at most 128 threads will do.

    Parameters:
        OutLayoutType: Layout of `selected`.
        out_origin: Origin of `selected`.
        IdsLayoutType: Layout of `pool_ids`.
        ids_origin: Origin of `pool_ids`.
        IROLayoutType: Layout of `input_row_offsets`.
        iro_origin: Origin of `input_row_offsets`.
        CacheLenLayoutType: Layout of `cache_lengths`.
        cache_len_origin: Origin of `cache_lengths`.
        kpool: Tokens per pool.
        pool_topk: Selected pools per query.
        always_select_tail: Whether the newest positions are selected too.

    Args:
        selected: Output `[total_tokens, pool_topk * kpool (+ kpool - 1)]`.
        pool_ids: Selected pools `[total_tokens, pool_topk]`.
        input_row_offsets: Token row offsets `[batch + 1]`.
        cache_lengths: Tokens cached before this call `[batch]`.
    """
    run_grid_thread(
        ExpandTopk[kpool, pool_topk, always_select_tail](
            selected,
            pool_ids,
            input_row_offsets,
            cache_lengths,
            Int(cache_lengths.dim[0]()),
        )
    )
