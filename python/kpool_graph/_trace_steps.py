"""Follows one request's tokens through a ring, rejected drafts included.

What lies where is read off the reference: each token's key is its serial number, and
each channel's position embedding silences all members but one, so that a pooled key
spells out which tokens the pool was made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import reference


@dataclass(frozen=True)
class Token:
    """A token that was put into the ring.

    Attributes:
        position: Absolute position.
        rejected: Whether it was a draft that did not stay.
    """

    position: int
    rejected: bool

    def __str__(self) -> str:
        return f"({self.position})" if self.rejected else str(self.position)


@dataclass(frozen=True)
class Pool:
    """A pool that a token closed.

    Attributes:
        id: Pool id.
        members: The tokens it was made of, oldest first; None for an entry that
            nothing was ever put into.
        provisional: Whether the token that closed it was rejected: the same pool
            closes again later.
    """

    id: int
    members: tuple[Token | None, ...]
    provisional: bool

    @property
    def strays(self) -> list[tuple[int, Token | None]]:
        """The members that should have been others, each with the position due.

        A provisional pool is judged by the positions alone: its own step's tokens
        are rejected with it.
        """
        first = self.id * len(self.members)
        return [
            (position, member)
            for position, member in enumerate(self.members, first)
            if member is None
            or member.position != position
            or (member.rejected and not self.provisional)
        ]


@dataclass(frozen=True)
class Write:
    """One token's way into the ring.

    Attributes:
        token: The token.
        entry: The entry it took.
        replaced: What that entry held.
        closed: The pool it closed, if any.
    """

    token: Token
    entry: int
    replaced: Token | None
    closed: Pool | None


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        writes: Its tokens, in order.
        entries: What the ring holds afterwards, by entry.
        live: Positions of the open pool that the next step needs.
    """

    writes: tuple[Write, ...]
    entries: tuple[Token | None, ...]
    live: range

    @property
    def closed(self) -> list[Pool]:
        """The pools that it closed."""
        return [write.closed for write in self.writes if write.closed]

    @property
    def lost(self) -> list[Write]:
        """The writes that took the entry of a token the next step needs."""
        return [
            write
            for write in self.writes
            if write.replaced
            and not write.replaced.rejected
            and write.replaced.position in self.live
        ]


@dataclass(frozen=True)
class Trace:
    """A request's steps on one ring.

    Attributes:
        kpool: Tokens per pool.
        next_n: Tokens that each step appends.
        reject: How many of them, the last ones, it rejects.
        ring_len: Entries of the ring.
        steps: The steps.
    """

    kpool: int
    next_n: int
    reject: int
    ring_len: int
    steps: tuple[Step, ...]

    @property
    def pools(self) -> list[Pool]:
        """The pools that were closed for good."""
        closed = (pool for step in self.steps for pool in step.closed)
        return [pool for pool in closed if not pool.provisional]


def trace(*, kpool: int, next_n: int, reject: int, ring_len: int, steps: int) -> Trace:
    """Decodes one request from position 0 on.

    Args:
        kpool: Tokens per pool, at least 1.
        next_n: Tokens a step appends.
        reject: How many of them, the last ones, each step rejects; below `next_n`.
        ring_len: Entries of the ring, at least `kpool`.
        steps: Steps to take.

    Returns:
        What happened.
    """
    tail = np.full((1, 2, ring_len, kpool), -1, np.float32)
    tokens: list[Token] = []
    taken: list[Step] = []
    first = 0
    for _ in range(steps):
        accepted = first + next_n - reject
        writes = []
        for position in range(first, first + next_n):
            tokens.append(Token(position, position >= accepted))
            writes.append(_put(tail, tokens))
        live = range(accepted // kpool * kpool, accepted)
        taken.append(Step(tuple(writes), _held(tail, tokens), live))
        first = accepted
    return Trace(kpool, next_n, reject, ring_len, tuple(taken))


def _put(tail: reference.Array, tokens: list[Token]) -> Write:
    """Stashes the last token, and sees what that did."""
    token, before = tokens[-1], _held(tail, tokens)
    kpool = tail.shape[3]
    serial = np.full((1, 1, kpool), len(tokens) - 1, np.float32)
    pooled, closed = reference.tail_update(
        tail,
        serial,
        np.zeros_like(serial),
        np.where(np.eye(kpool) == 1, 0, -np.inf).astype(np.float32),
        np.array([[token.position]]),
        np.array([0]),
        kpool=kpool,
    )
    [entry] = np.flatnonzero(tail[0, reference.KEYS, :, 0] == serial[0, 0, 0])
    pool = None
    if closed[0, 0] >= 0:
        members = tuple(_token(each, tokens) for each in pooled[0, 0])
        pool = Pool(int(closed[0, 0]), members, token.rejected)
    return Write(token, int(entry), before[entry], pool)


def _held(tail: reference.Array, tokens: list[Token]) -> tuple[Token | None, ...]:
    return tuple(_token(key, tokens) for key in tail[0, reference.KEYS, :, 0])


def _token(serial: float, tokens: list[Token]) -> Token | None:
    return None if serial < 0 else tokens[int(serial)]
