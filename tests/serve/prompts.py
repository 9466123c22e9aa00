"""What the tests ask the server, and what it must answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kpool_graph.testing import Answer, Prompt, ReferenceDecoder

FIRST_WORD, WORDS = 3, 512
PAGE = 128
SLOTS = 8

# Around the ends of pools of 3 and 4, of pages, of a 13-token chunk; up to 300.
LENGTHS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 16, 26, 31),
    *(33, 39, 64, 65, 127, 128, 129, 130, 131, 200, 255, 256, 257, 261, 299, 300),
)
# What a prompt takes from a common beginning of two pages, and adds to it.
SHARED = (
    *((128, 0), (256, 0), (256, 1), (256, 2), (256, 3), (256, 4), (256, 9), (255, 1)),
    *((255, 2), (254, 2), (254, 10), (253, 5), (200, 40), (130, 1), (130, 9), (129, 3)),
    *(
        (128, 1),
        (128, 2),
        (128, 5),
        (128, 128),
        (127, 1),
        (127, 4),
        (100, 3),
        (256, 40),
    ),
    *((256, 13), (256, 21), (128, 77), (257, 1), (258, 3), (259, 2), (260, 6), (40, 1)),
)
# Prompts that are hung up on in the middle of their answer.
CANCELLED = (4, 13, 20, 27)
CANCELLED_TOKENS = 200


def _request(index: int, tokens: list[int]) -> Prompt:
    cancel = index in CANCELLED
    return Prompt(
        tuple(tokens),
        max_tokens=CANCELLED_TOKENS if cancel else 8 + index % 13,
        stream=index % 3 == 1,
        cancel=cancel,
    )


def separate_prompts() -> list[Prompt]:
    """32 prompts of 1 to 300 words with nothing in common."""
    random = np.random.default_rng(seed=8)
    return [
        _request(index, random.integers(FIRST_WORD, WORDS, length).tolist())
        for index, length in enumerate(LENGTHS)
    ]


def shared_prompts() -> list[Prompt]:
    """32 prompts that begin alike, up to and past the ends of pages."""
    random = np.random.default_rng(seed=8)
    common = random.integers(FIRST_WORD, WORDS, 3 * PAGE).tolist()
    return [
        _request(
            index, common[:taken] + random.integers(FIRST_WORD, WORDS, own).tolist()
        )
        for index, (taken, own) in enumerate(SHARED)
    ]


def wanted_answers(checkpoint: Path, prompts: Sequence[Prompt]) -> list[Answer]:
    """What the reference answers; nothing to prompts that will be cancelled."""
    reference = ReferenceDecoder.load(checkpoint)
    return [
        reference.answer(prompt.tokens, 0 if prompt.cancel else prompt.max_tokens)
        for prompt in prompts
    ]
