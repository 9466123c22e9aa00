"""The list model: what an engine must hold, with every token in a list.

Tell a `ListModel` what the engine did, then ask it what the ring and the pooled keys
must be. A token is any object of its own; where numbers are compared, it is a pair
`(key, gate)` of `[head_dim]` arrays in storage form (float32, float16, or uint16 that
holds bfloat16 bits). Plain lists and loops, independent of the kernels and of MAX.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from .. import reference
from ..reference import Array


class ListModel:
    """Requests as lists of tokens, and the ring as a list of what was stashed last.

    Attributes:
        kpool: Tokens per pool.
        ring_len: Entries per slot.
        tokens: Every committed token of each request that owns a slot, by position.
        slots: The slot of each.
        ring: `ring[slot][entry]`, the token stashed there last, whoever's it is.
    """

    def __init__(self, max_slots: int, kpool: int, ring_len: int) -> None:
        """Starts without requests.

        Args:
            max_slots: Slots.
            kpool: Tokens per pool.
            ring_len: Entries per slot.
        """
        self.kpool = kpool
        self.ring_len = ring_len
        self.tokens: dict[Hashable, list[Any]] = {}
        self.slots: dict[Hashable, int] = {}
        self.ring: list[list[Any]] = [[None] * ring_len for _ in range(max_slots)]

    def claim(self, request: Hashable, slot: int, cached: Iterable[Any] = ()) -> None:
        """Starts a request. Its slot keeps what the last owner left.

        Args:
            request: Names it.
            slot: Its slot.
            cached: Tokens known from a prefix cache; they were not stashed.
        """
        self.tokens[request] = list(cached)
        self.slots[request] = slot

    def release(self, request: Hashable) -> None:
        """Ends a request.

        Args:
            request: The request.
        """
        del self.tokens[request], self.slots[request]

    def append(self, request: Hashable, tokens: Iterable[Any]) -> range:
        """Does what `tail_update` and `ragged_update` do to one request.

        Args:
            request: The request.
            tokens: Its next tokens, drafts included.

        Returns:
            Ids of the pools that close, in order.
        """
        before = self.visible(request)
        for token in tokens:
            self._stash(request, len(self.tokens[request]), token)
            self.tokens[request].append(token)
        return range(before, self.visible(request))

    def seed(self, request: Hashable, tokens: Iterable[Any]) -> range:
        """Does what `ring_close`, `compress` and `seed_tail` do to one request.

        Args:
            request: The request.
            tokens: Its next tokens.

        Returns:
            Ids of the pools that close, in order.
        """
        before, start = self.visible(request), len(self.tokens[request])
        self.tokens[request] += tokens
        for position in self.live(request):
            if position >= start:
                self._stash(request, position, self.tokens[request][position])
        return range(before, self.visible(request))

    def _stash(self, request: Hashable, position: int, token: Any) -> None:
        self.ring[self.slots[request]][position % self.ring_len] = token

    def can_rewind(self, request: Hashable, to_length: int) -> bool:
        """Whether the ring still holds every member that would wait.

        Args:
            request: The request.
            to_length: Position to go on at, at most its length.

        Returns:
            True if decoding from there comes out right.
        """
        slot, tokens = self.ring[self.slots[request]], self.tokens[request]
        first = to_length // self.kpool * self.kpool
        return all(
            slot[position % self.ring_len] is tokens[position]
            for position in range(first, to_length)
        )

    def rewind(self, request: Hashable, to_length: int) -> None:
        """Takes a request's newest tokens back; the ring keeps them.

        Args:
            request: The request.
            to_length: Tokens that stay.
        """
        del self.tokens[request][to_length:]

    def fork(self, source: Hashable, request: Hashable, slot: int) -> None:
        """Starts a request with the tokens of another and a copy of its slot.

        Args:
            source: The other request.
            request: Names the new one.
            slot: The new one's slot.
        """
        self.claim(request, slot, self.tokens[source])
        self.ring[slot] = list(self.ring[self.slots[source]])

    def live(self, request: Hashable) -> range:
        """Lists the positions whose tokens wait in the ring.

        Args:
            request: The request.

        Returns:
            The positions of its unfinished pool so far.
        """
        length = len(self.tokens[request])
        return range(length // self.kpool * self.kpool, length)

    def visible(self, request: Hashable) -> int:
        """Counts the pools that a query at the end of a request may select.

        Args:
            request: The request.

        Returns:
            Complete pools: ids 0 up to, not including, this one.
        """
        return len(self.tokens[request]) // self.kpool

    def members(self, request: Hashable, pool: int) -> tuple[Array, Array]:
        """Gathers a pool's members from the request's tokens.

        Args:
            request: The request; its tokens are `(key, gate)`.
            pool: Id of a visible pool.

        Returns:
            keys and gate scores, each `[kpool, head_dim]`.
        """
        first = pool * self.kpool
        keys, gates = zip(
            *self.tokens[request][first : first + self.kpool], strict=True
        )
        return np.stack(keys), np.stack(gates)

    def check_pooled(
        self, request: Hashable, pool: int, pooled: Array, ape: Array
    ) -> None:
        """Requires an engine's pooled key to be that of the request's own tokens.

        Args:
            request: The request.
            pool: Id of a visible pool.
            pooled: `[head_dim]`, what the engine would score for it.
            ape: `[kpool, head_dim]` float32.

        Raises:
            AssertionError: Naming the request, the pool and a channel, if it is off
                by more than float32 arithmetic and one rounding can be.
        """
        keys, gates = self.members(request, pool)
        wrong = wrong_channels(pooled, keys, gates, ape)
        if wrong.any():
            channel = int(np.argmax(wrong))
            got = float(reference.values(pooled)[channel])
            exact = float(reference.pool(keys, gates, ape)[channel])
            raise AssertionError(
                f"request {request!r}, pool {pool}: {np.count_nonzero(wrong)} of"
                f" {len(wrong)} channels are wrong, first {channel}: got {got!r}, exact"
                f" {exact!r}"
            )

    def check_ring(self, request: Hashable, tail: Array) -> None:
        """Requires an engine's ring to hold what the request waits for, bit for bit.

        Args:
            request: The request.
            tail: `[max_slots, 2, ring_len, head_dim]`, the ring in storage form.

        Raises:
            AssertionError: Naming the request, its slot and a position.
        """
        slot = tail[self.slots[request]]
        for position in self.live(request):
            held = slot[:, position % self.ring_len]
            want = np.stack(self.tokens[request][position])
            if held.tobytes() != want.tobytes():
                raise AssertionError(
                    f"request {request!r}: slot {self.slots[request]} does not hold the"
                    f" token of position {position}"
                )


def wrong_channels(pooled: Array, keys: Array, gates: Array, ape: Array) -> Array:
    """Compares a pooled key with the exact one, each channel on its own.

    Args:
        pooled: `[head_dim]` storage, what the op returned.
        keys: `[kpool, head_dim]` storage, the members' keys, oldest first.
        gates: `[kpool, head_dim]` storage, their gate scores.
        ape: `[kpool, head_dim]` float32.

    Returns:
        `[head_dim]` bool, true where it is off by more than the accuracy that the
        ops promise; with one member, where it is not that member's key bit for bit.
    """
    if len(keys) == 1:
        width = f"u{pooled.dtype.itemsize}"
        return np.asarray(pooled.view(width) != keys[0].view(width))
    exact = reference.pool(keys, gates, ape)
    ulp = reference.ulp(exact, pooled.dtype)
    tolerance = reference.pool_tolerance(keys, gates, ape, ulp)
    with np.errstate(invalid="ignore"):
        value = reference.values(pooled)
        same = (value == exact) | (np.isnan(value) & np.isnan(exact))
        near = np.isfinite(exact) & (np.abs(value - exact) <= tolerance)
    return np.asarray(~(same | near))
