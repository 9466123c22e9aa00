"""Slot ownership on the host: who owns which slot, and what it still holds."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from max.driver import Buffer

from ._slot_state import PendingCopies, Span
from .ring import TailRing, min_ring_len

# Outside every ring, stacked ones too, so that a padded row whose positions were
# not padded fails instead of writing into some request's slot.
PADDING_SLOT = 2**32 - 1
PADDING_POSITION = -1

UInt32Array = npt.NDArray[np.uint32]
Int32Array = npt.NDArray[np.int32]


class SlotError(RuntimeError):
    """A slot pool was asked for what its ring cannot do."""


class SlotPool:
    """Gives out the slots of one ring, and tracks what each still holds.

    A request is `claim`ed, `advance`d after each op that stashed its tokens, taken
    back with `rewind` where tokens were rejected, and `release`d. Whatever would
    come out wrong on the device is refused. Safe to call from several threads; a
    call costs the same however long its requests are. The only device work is that
    of `TailRing(poison=True)`.
    """

    def __init__(
        self,
        ring: TailRing,
        *,
        buffers: Sequence[Buffer] = (),
        page_size: int | None = None,
    ) -> None:
        """Starts with every slot free.

        Args:
            ring: The ring; its `max_slots` is the pool's capacity.
            buffers: The buffers that hold it, one a layer, or stacked. Needed with
                `ring.poison`, to fill a slot with NaN when it is given out.
            page_size: Tokens per page of the prefix cache, if there is one.

        Raises:
            SlotError: If a page would end in the middle of a pool, or there is
                nothing to poison.
        """
        if page_size is not None and (page_size < 1 or page_size % ring.kpool):
            raise SlotError(
                f"SlotPool: page_size ({page_size}) must be a multiple of kpool"
                f" ({ring.kpool}), so that no page ends in the middle of a pool"
            )
        if ring.poison and not buffers:
            raise SlotError(
                "SlotPool: poison=True needs the ring's buffers: pass"
                " buffers=[ring.allocate(), ...]"
            )
        self.ring = ring
        self._buffers = tuple(buffers) if ring.poison else ()
        self._lock = threading.Lock()
        self._spans: dict[Hashable, Span] = {}
        self._free = list(range(ring.max_slots - 1, -1, -1))
        self._copies = PendingCopies()

    def __len__(self) -> int:
        """Counts the requests that own a slot."""
        return len(self._spans)

    @property
    def free_slots(self) -> int:
        """How many more requests can be claimed."""
        return len(self._free)

    def usable_prefix(self, hit_tokens: int) -> int:
        """Cuts a prefix cache's hit to what a request can start from.

        Args:
            hit_tokens: Tokens of the prompt that the cache knows.

        Returns:
            The largest multiple of kpool in it. Feed the tokens after it again: a
            cache of pools holds no part of one.
        """
        return hit_tokens - hit_tokens % self.ring.kpool

    def claim(self, request_id: Hashable, cached_tokens: int = 0) -> int:
        """Gives a request a slot, which needs no clearing.

        Args:
            request_id: Names the request from here on.
            cached_tokens: Where the request starts: the tokens of its prompt whose
                pools are cached already, a multiple of kpool.

        Returns:
            The slot.

        Raises:
            SlotError: If the request owns a slot, none is free, or the request
                would start in the middle of a pool.
        """
        with self._lock:
            start = self.usable_prefix(cached_tokens)
            if cached_tokens < 0:
                raise SlotError(
                    f"claim: request {request_id!r}: cached_tokens must be at least 0,"
                    f" got {cached_tokens}"
                )
            if start != cached_tokens:
                raise SlotError(
                    f"claim: unseeded mid-pool start: request {request_id!r} has"
                    f" {cached_tokens} cached tokens, no multiple of kpool"
                    f" ({self.ring.kpool}), and no slot holds tokens {start} to"
                    f" {cached_tokens - 1}; claim with cached_tokens={start} and feed"
                    " them again"
                )
            return self._give("claim", request_id, start, start)

    def release(self, request_id: Hashable) -> None:
        """Takes a request's slot back.

        Args:
            request_id: The request.

        Raises:
            SlotError: If it owns no slot, or forks of it wait to be copied.
        """
        with self._lock:
            span = self._span("release", request_id)
            if self._copies.readers(span.slot):
                raise SlotError(
                    f"release: slot {span.slot} of request {request_id!r} is yet to be"
                    f" copied to {self._copies.readers(span.slot)} forks; run"
                    " copy_slots(tail, *pool.take_copies()) first"
                )
            self._copies.drop(span.slot)
            del self._spans[request_id]
            self._free.append(span.slot)

    def slot_idx(self, request_ids: Iterable[Hashable]) -> UInt32Array:
        """Looks up a batch's slots: the `slot_idx` operand of every op.

        Args:
            request_ids: The request of each row, each at most once.

        Returns:
            `[rows]` uint32.

        Raises:
            SlotError: If a request owns no slot or occurs twice, or forks wait to
                be copied.
        """
        rows = list(request_ids)
        with self._lock:
            self._require_copied("slot_idx")
            seen: set[Hashable] = set()
            for row in rows:
                if row in seen:
                    raise SlotError(
                        f"slot_idx: request {row!r} occurs twice; give it one row a"
                        " call"
                    )
                seen.add(row)
            slots = [self._span("slot_idx", row).slot for row in rows]
        return np.array(slots, np.uint32)

    def length(self, request_id: Hashable) -> int:
        """Looks up the position at which a request goes on.

        Args:
            request_id: The request.

        Returns:
            Its tokens so far, cached ones included.

        Raises:
            SlotError: If it owns no slot.
        """
        with self._lock:
            return self._span("length", request_id).length

    def positions(self, request_ids: Iterable[Hashable], next_n: int) -> Int32Array:
        """Numbers a batch's next tokens: the `positions` operand of `tail_update`.

        Args:
            request_ids: The request of each row.
            next_n: Tokens per row; where a row brings fewer, set the rest to -1.

        Returns:
            `[rows, next_n]` int32.

        Raises:
            SlotError: If a request owns no slot.
        """
        rows = list(request_ids)
        with self._lock:
            starts = [self._span("positions", row).length for row in rows]
        return np.array(
            [np.arange(start, start + next_n) for start in starts], np.int32
        ).reshape(len(rows), next_n)

    def pad_to(
        self, batch: int, positions: Int32Array, slot_idx: UInt32Array
    ) -> tuple[Int32Array, UInt32Array]:
        """Fills a decode batch up with rows that touch no slot.

        Args:
            batch: Rows wanted.
            positions: `[rows, next_n]` int32.
            slot_idx: `[rows]` uint32.

        Returns:
            positions `[batch, next_n]`, -1 in the rows added, and slot_idx
            `[batch]`, a slot outside every ring there.

        Raises:
            SlotError: If there are more rows already.
        """
        rows = len(slot_idx)
        if rows > batch:
            raise SlotError(
                f"pad_to: {rows} rows do not fit a batch of {batch}; split them"
            )
        added = (0, batch - rows)
        return (
            np.pad(positions, (added, (0, 0)), constant_values=PADDING_POSITION),
            np.pad(slot_idx, added, constant_values=PADDING_SLOT),
        )

    def advance(
        self,
        request_id: Hashable,
        n_tokens: int,
        *,
        may_reject: int = 0,
        seeded: bool = False,
    ) -> int:
        """Notes that an op appended a request's next tokens.

        Args:
            request_id: The request.
            n_tokens: Tokens appended, drafts included.
            may_reject: How many of the newest may be taken back with `rewind`. What
                the ring cannot take back at every position is refused here, so at
                the first such step; `rewind` itself goes by what the slot holds.
            seeded: Whether the op was `seed_tail`, which stashes only the tokens of
                the last, unfinished pool. Such tokens are final.

        Returns:
            The request's new length.

        Raises:
            SlotError: If the request owns no slot, the step is wider than the ring
                allows, or forks wait to be copied.
        """
        ring = self.ring
        with self._lock:
            span = self._span("advance", request_id)
            self._require_copied("advance")
            if not 0 <= may_reject <= n_tokens:
                raise SlotError(
                    f"advance: request {request_id!r} cannot append {n_tokens} tokens"
                    f" of which {may_reject} may be rejected; use 0 <= may_reject <="
                    " n_tokens"
                )
            if may_reject and seeded:
                raise SlotError(
                    f"advance: request {request_id!r} appends {n_tokens} tokens of"
                    f" which {may_reject} may be rejected, but seed_tail stashes too"
                    " few of them; use tail_update or ragged_update"
                )
            wanted = min_ring_len(ring.kpool, max(may_reject, 1))
            if ring.ring_len < wanted:
                raise SlotError(
                    f"advance: request {request_id!r} appends {n_tokens} tokens of"
                    f" which {may_reject} may be rejected: ring_len must be at least"
                    f" kpool - 1 + {may_reject} ({wanted}), got {ring.ring_len}; use"
                    f" TailRing(speculative_tokens={wanted - ring.kpool})"
                )
            if seeded:
                span.seed(n_tokens, ring.ring_len, ring.kpool)
            else:
                span.append(n_tokens, ring.ring_len)
            return span.length

    def rewind(self, request_id: Hashable, to_length: int) -> None:
        """Takes a request's newest tokens back.

        Args:
            request_id: The request.
            to_length: Tokens that stay: the request goes on at this position.
                Always possible at a multiple of kpool, where no member waits.

        Raises:
            SlotError: If the request owns no slot or is shorter, or its slot no
                longer holds the members of the pool that `to_length` cuts.
        """
        with self._lock:
            span = self._span("rewind", request_id)
            if not 0 <= to_length <= span.length:
                raise SlotError(
                    f"rewind: request {request_id!r} of length {span.length} cannot go"
                    f" on at {to_length}; go on at 0 to {span.length}"
                )
            if span.missing(to_length, self.ring.kpool):
                start = to_length - to_length % self.ring.kpool
                raise SlotError(
                    f"rewind: request {request_id!r} of length {span.length} cannot go"
                    f" on at {to_length}: that needs tokens {start} to"
                    f" {to_length - 1}, and slot {span.slot} holds none before"
                    f" {span.held_from} in its {self.ring.ring_len} entries; rewind to"
                    f" {start} and feed them again, or use a ring with more"
                    " speculative_tokens"
                )
            span.cut(to_length)

    def fork(self, source_id: Hashable, request_id: Hashable) -> int:
        """Starts a request with the tokens of another one.

        Also the way to save a request or to move it: fork it, then release it. The
        slot's contents follow with `copy_slots`; see `take_copies`.

        Args:
            source_id: A request that owns a slot.
            request_id: The new request.

        Returns:
            Its slot.

        Raises:
            SlotError: If the source owns no slot, the new request owns one, or none
                is free.
        """
        with self._lock:
            source = self._span("fork", source_id)
            slot = self._give("fork", request_id, source.length, source.held_from)
            self._copies.add(source.slot, slot)
            return slot

    def take_copies(self, layers: int = 1) -> tuple[UInt32Array, UInt32Array]:
        """Hands over the copies that forks wait for.

        Run `copy_slots(tail, *pool.take_copies())` on every ring of the pool before
        the next op: until they are taken, the pool looks no slot up.

        Args:
            layers: Rings in the buffer that they are for, if several are stacked.

        Returns:
            src_slots and dst_slots, each `[layers * pairs]` uint32.
        """
        with self._lock:
            pairs = np.array(self._copies.take(), np.int64)
        first_slots = np.arange(layers)[:, np.newaxis] * self.ring.max_slots
        src, dst = ((first_slots + side).ravel().astype(np.uint32) for side in pairs)
        return src, dst

    def _give(
        self, call: str, request_id: Hashable, length: int, held_from: int
    ) -> int:
        if request_id in self._spans:
            raise SlotError(
                f"{call}: request {request_id!r} owns slot"
                f" {self._spans[request_id].slot} already; release it first"
            )
        if not self._free:
            raise SlotError(
                f"{call}: request {request_id!r} finds no free slot: all"
                f" {self.ring.max_slots} are owned; release a request first, or use a"
                " ring with more max_slots"
            )
        slot = self._free[-1]
        for buffer in self._buffers:
            self.ring.poison_slots(buffer, [slot])
        self._free.pop()
        self._spans[request_id] = Span(slot, length, held_from)
        return slot

    def _span(self, call: str, request_id: Hashable) -> Span:
        if request_id not in self._spans:
            raise SlotError(
                f"{call}: request {request_id!r} owns no slot: it was never claimed, or"
                " is released already; claim it first"
            )
        return self._spans[request_id]

    def _require_copied(self, call: str) -> None:
        if self._copies:
            raise SlotError(
                f"{call}: {len(self._copies)} forks wait to be copied; run"
                " copy_slots(tail, *pool.take_copies()) first"
            )
