"""Continuous batching on paper: who does what at which step, in which ring slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Not a multiple of kpool, so that chunks end in the middle of pools.
CHUNK_TOKENS = 13
STEPS_BETWEEN_ARRIVALS = 4
PADDING = -1


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens `[start, end)` of one request, prefilled in one step."""

    request: int
    slot: int
    start: int
    end: int


@dataclass(frozen=True)
class Row:
    """One row of a decode batch: the token at `position`, or `PADDING`."""

    request: int
    slot: int
    position: int


@dataclass(frozen=True)
class Step:
    """One step of the server: a ragged prefill call, then a decode call.

    A request that is still in prefill has a padded row in the decode batch.
    Either list is empty if no request needs that call.
    """

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Row] = field(default_factory=list)

    @property
    def decoding(self) -> int:
        """Rows of the decode batch that are not padding."""
        return sum(row.position != PADDING for row in self.decode)

    @property
    def slot_owners(self) -> dict[int, int]:
        """The request that owns each slot in use."""
        prefilled = {chunk.slot: chunk.request for chunk in self.prefill}
        return prefilled | {row.slot: row.request for row in self.decode}


@dataclass
class _Running:
    request: int
    slot: int
    prompt: int
    tokens: int
    done: int = 0


def prompt_tokens(tokens: int) -> int:
    """Splits a text: its first 40% is the prompt, the rest is decoded.

    Args:
        tokens: Tokens of the text.

    Returns:
        Tokens of the prompt.
    """
    return tokens * 2 // 5


def schedule(lengths: Sequence[int], max_slots: int) -> Iterator[Step]:
    """Plans every step until all requests are done.

    Request `i` arrives at step `i * STEPS_BETWEEN_ARRIVALS` and waits for a slot.
    It gives its slot back after its last token.

    Args:
        lengths: Tokens of each request, at least 1.
        max_slots: Slots in the ring.

    Yields:
        Steps in which at least one token is processed.
    """
    waiting = list(range(len(lengths)))
    free = list(range(max_slots))
    running: list[_Running] = []
    clock = 0
    while waiting or running:
        while waiting and free and waiting[0] * STEPS_BETWEEN_ARRIVALS <= clock:
            request = waiting.pop(0)
            tokens = lengths[request]
            running.append(_Running(request, free.pop(), prompt_tokens(tokens), tokens))
        step = Step()
        for each in running:
            if each.done < each.prompt:
                end = min(each.done + CHUNK_TOKENS, each.prompt)
                step.prefill.append(Chunk(each.request, each.slot, each.done, end))
                step.decode.append(Row(each.request, each.slot, PADDING))
                each.done = end
            else:
                step.decode.append(Row(each.request, each.slot, each.done))
                each.done += 1
        if not step.decoding:
            step.decode.clear()
        if step.prefill or step.decode:
            yield step
        free += [each.slot for each in running if each.done == each.tokens]
        running = [each for each in running if each.done < each.tokens]
        # A request's row says nothing about its slot: rows change every step.
        running = running[1:] + running[:1]
        clock += 1
