"""A ragged batch: which rows of `k` and `gate` are whose, at which positions."""

from layout import TileTensor

from .checks import SlotOwners
from .vectors import ReadPointer, load, readable


@fieldwise_init
struct Chunk(TrivialRegisterPassable):
    """The tokens that one request brings in a call."""

    var first_row: Int
    """Row of its first token in `k` and `gate`."""
    var last_row: Int
    """Row after its last token."""
    var first_position: Int
    """Absolute position of its first token: the tokens cached before."""

    @inline(.always)
    def count(self) -> Int:
        """Counts the request's tokens.

        Returns:
            Tokens in this call.
        """
        return self.last_row - self.first_row

    @inline(.always)
    def end_position(self) -> Int:
        """Finds where the request's next call goes on.

        Returns:
            The position after its last token.
        """
        return self.first_position + self.count()

    @inline(.always)
    def row(self, position: Int) -> Int:
        """Finds one of the request's tokens.

        Args:
            position: A position of this chunk.

        Returns:
            Its row in `k` and `gate`.
        """
        return self.first_row + position - self.first_position

    @inline(.always)
    def closing[kpool: Int](self) -> Int:
        """Counts the pools that the request completes in this call.

        Parameters:
            kpool: Tokens per pool.

        Returns:
            Pools, the one that was pending included.
        """
        return self.end_position() // kpool - self.first_position // kpool

    @inline(.always)
    def closes_pending[kpool: Int](self) -> Bool:
        """Whether the first pool completed has members from earlier calls.

        Parameters:
            kpool: Tokens per pool.

        Returns:
            True if so.
        """
        return self.first_position % kpool != 0 and self.closing[kpool]() > 0


@inline(.always)
def owner_of[
    extra: Int = 0, divisor: Int = 1
](offsets: ReadPointer[DType.uint32], requests: Int, row: Int) -> Int:
    """Finds the request that owns an output row, by binary search.

    Request `r` owns the rows from `(offsets[r] + r * extra) // divisor` on, up
    to the next request's. Of requests that start together the last one owns.

    Parameters:
        extra: Rows added for every request.
        divisor: Offsets per row.

    Args:
        offsets: Offsets per request, not decreasing.
        requests: Requests in the batch.
        row: The output row.

    Returns:
        The request, or -1 if even the first one starts later.
    """
    var low = 0
    var high = requests
    while low < high:
        var middle = (low + high) // 2
        var start = (Int(load[1](offsets, middle)) + middle * extra) // divisor
        if start <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inline(.always)
def next_owner_of[
    extra: Int = 0, divisor: Int = 1
](
    offsets: ReadPointer[DType.uint32], requests: Int, row: Int, owner: Int
) -> Int:
    """Finds the request that owns an output row, coming from a row before it.

    The parameters and the rule are `owner_of`'s. A walk through all rows takes
    one step a row and one a request.

    Parameters:
        extra: Rows added for every request.
        divisor: Offsets per row.

    Args:
        offsets: Offsets per request, not decreasing.
        requests: Requests in the batch.
        row: The output row.
        owner: The earlier row's owner.

    Returns:
        The request, or -1 if even the first one starts later.
    """
    var next = owner + 1
    while (
        next < requests
        and (Int(load[1](offsets, next)) + next * extra) // divisor <= row
    ):
        next += 1
    return next - 1


struct RaggedBatch(TrivialRegisterPassable):
    """The row tables of a ragged batch."""

    var input_row_offsets: ReadPointer[DType.uint32]
    """Token row offsets `[requests + 1]`."""
    var cache_lengths: ReadPointer[DType.uint32]
    """Tokens cached before this call `[requests]`."""
    var total_tokens: Int
    """Rows of `k` and `gate`."""
    var requests: Int
    """Requests in the batch."""

    @inline(.always)
    def __init__(
        out self,
        input_row_offsets: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        cache_lengths: TileTensor[
            mut=False, .uint32, address_space=.GENERIC, ...
        ],
        total_tokens: Int,
        requests: Int,
    ):
        """Takes the row tables, dense.

        Args:
            input_row_offsets: Token row offsets `[requests + 1]`.
            cache_lengths: Tokens cached before this call `[requests]`.
            total_tokens: Rows of `k` and `gate`.
            requests: Requests in the batch.
        """
        self.input_row_offsets = readable(input_row_offsets)
        self.cache_lengths = readable(cache_lengths)
        self.total_tokens = total_tokens
        self.requests = requests

    @inline(.always)
    def chunk(self, request: Int) -> Chunk:
        """Reads a request's entries of the row tables.

        Args:
            request: Index in the batch.

        Returns:
            What the request brings.
        """
        return Chunk(
            first_row=Int(load[1](self.input_row_offsets, request)),
            last_row=Int(load[1](self.input_row_offsets, request + 1)),
            first_position=Int(load[1](self.cache_lengths, request)),
        )

    @inline(.always)
    def is_sound(self, chunk: Chunk) -> Bool:
        """Whether a request's rows exist. A GPU skips one whose do not.

        Args:
            chunk: The request's chunk.

        Returns:
            True if its offsets do not decrease or pass the token count.
        """
        return (
            chunk.first_row <= chunk.last_row
            and chunk.last_row <= self.total_tokens
        )

    def check(self, op: StaticString, request: Int) raises:
        """Refuses a request whose row offsets do not delimit rows of `k`.

        Args:
            op: Name of the op.
            request: Index in the batch.

        Raises:
            Error: If the offsets decrease or pass the token count.
        """
        var chunk = self.chunk(request)
        if chunk.last_row < chunk.first_row:
            raise Error(
                op,
                ": input_row_offsets[",
                request + 1,
                "] must not be below input_row_offsets[",
                request,
                "] (",
                chunk.first_row,
                "), got ",
                chunk.last_row,
            )
        if chunk.last_row > self.total_tokens:
            raise Error(
                op,
                ": input_row_offsets[",
                request + 1,
                "] must be at most total_tokens (",
                self.total_tokens,
                "), got ",
                chunk.last_row,
            )


def check_requests(
    op: StaticString,
    batch: RaggedBatch,
    slot_idx: ReadPointer[DType.uint32],
    max_slots: Int,
) raises:
    """Refuses a ragged batch that must not touch the ring.

    Args:
        op: Name of the op.
        batch: The batch.
        slot_idx: Ring slots `[requests]`.
        max_slots: Slots in the ring.

    Raises:
        Error: If the row offsets decrease or pass the token count, or if a
            request with tokens has a slot outside the ring or another such
            request's.
    """
    var owners = SlotOwners(op, "slot_idx", "row's with real tokens", max_slots)
    for request in range(batch.requests):
        batch.check(op, request)
        if batch.chunk(request).count() > 0:
            owners.claim(request, Int(load[1](slot_idx, request)))
