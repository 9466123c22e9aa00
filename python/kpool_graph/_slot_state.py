"""What a slot pool knows of its slots: plain arithmetic, no lock, no request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Span:
    """What one slot holds of the request that owns it.

    Attributes:
        slot: The slot.
        length: Tokens of the request; it goes on at this position.
        held_from: Of the positions below `length` the slot holds those from here
            on, and no others.
    """

    slot: int
    length: int
    held_from: int

    def append(self, n_tokens: int, ring_len: int) -> None:
        """Notes tokens that were all stashed, as `tail_update` does.

        A position below `length - ring_len` has been overwritten before, so what
        is held stays one span: it loses what lies a ring before the new tokens.

        Args:
            n_tokens: Tokens.
            ring_len: Entries per slot.
        """
        self.length += n_tokens
        self.held_from = max(self.held_from, self.length - ring_len)

    def seed(self, n_tokens: int, ring_len: int, kpool: int) -> None:
        """Notes tokens of which only the last pool's were stashed, by `seed_tail`.

        Args:
            n_tokens: Tokens.
            ring_len: Entries per slot.
            kpool: Tokens per pool.
        """
        end = self.length + n_tokens
        stashed_from = end - end % kpool
        if stashed_from > self.length:
            self.held_from = stashed_from
        self.append(n_tokens, ring_len)

    def missing(self, to_length: int, kpool: int) -> bool:
        """Whether a member that `to_length` leaves waiting is gone.

        Args:
            to_length: Position to go on at, at most `length`.
            kpool: Tokens per pool.

        Returns:
            True if so; never at a multiple of kpool, where none waits.
        """
        return to_length - to_length % kpool < min(self.held_from, to_length)

    def cut(self, to_length: int) -> None:
        """Takes the newest tokens back.

        Args:
            to_length: Tokens that stay.
        """
        self.length = to_length
        self.held_from = min(self.held_from, to_length)


class PendingCopies:
    """Slots that must be copied before the ring is used again."""

    def __init__(self) -> None:
        """Starts with none."""
        self._source_of: dict[int, int] = {}
        self._readers: dict[int, int] = {}

    def __len__(self) -> int:
        """Counts the pairs."""
        return len(self._source_of)

    def readers(self, slot: int) -> int:
        """Counts the copies that will read a slot.

        Args:
            slot: The slot.

        Returns:
            Copies.
        """
        return self._readers.get(slot, 0)

    def add(self, source: int, slot: int) -> None:
        """Notes a copy, and whose bits it is of where the source awaits its own.

        Every source is read before a slot is written, so a copy of a copy must
        read the first source.

        Args:
            source: Slot to copy from.
            slot: Slot to copy to.
        """
        origin = self._source_of.get(source, source)
        self._source_of[slot] = origin
        self._readers[origin] = self.readers(origin) + 1

    def drop(self, slot: int) -> None:
        """Forgets the copy to a slot, if there is one.

        Args:
            slot: The slot.
        """
        source = self._source_of.pop(slot, None)
        if source is not None:
            self._readers[source] -= 1

    def take(self) -> tuple[list[int], list[int]]:
        """Forgets all copies.

        Returns:
            The slots to copy from, and the slots to copy to.
        """
        pairs = self._source_of
        self._source_of, self._readers = {}, {}
        return list(pairs.values()), list(pairs)
