"""The reference decoder can be trusted to tell right answers from wrong ones."""

from __future__ import annotations

import re

import numpy as np
import pytest
from prompts import separate_prompts, shared_prompts

from kpool_graph.serve_demo import example_folder
from kpool_graph.testing import ReferenceDecoder

PROMPTS = {"separate": separate_prompts, "shared": shared_prompts}


@pytest.mark.parametrize("kpool", [3, 4])
@pytest.mark.parametrize("prompts", PROMPTS)
def test_no_choice_is_so_close_that_rounding_could_change_it(
    make_checkpoint, wanted, prompts, kpool
):
    """The server computes in float32, the reference in float64."""
    checkpoint = make_checkpoint(kpool)
    asked = PROMPTS[prompts]()
    answers = wanted(kpool, asked)
    exact = ReferenceDecoder.load(checkpoint)
    rounded = ReferenceDecoder.load(checkpoint, dtype=np.float32)
    error = 0.0
    for prompt, answer in zip(asked, answers, strict=True):
        tokens = [*prompt.tokens, *answer.tokens]
        logits = (
            decoder.logits(tokens, steps_from=len(prompt.tokens))
            for decoder in (exact, rounded)
        )
        error = max(error, float(np.abs(np.subtract(*logits)).max()))
    # A sum in another order than NumPy's may be off by a few times as much.
    assert min(answer.margin for answer in answers) > 100 * error


@pytest.mark.parametrize("kpool", [3, 4])
def test_a_decoder_that_loses_the_ring_answers_otherwise(
    make_checkpoint, wanted, kpool
):
    lossy = ReferenceDecoder.load(make_checkpoint(kpool), keeps_ring=False)
    prompts = separate_prompts()
    same = [
        lossy.answer(prompt.tokens, prompt.max_tokens).tokens == answer.tokens
        for prompt, answer in zip(prompts, wanted(kpool, prompts), strict=True)
        if not prompt.cancel
    ]
    assert sum(same) <= len(same) // 10


def test_the_readme_shows_what_the_model_says(make_checkpoint):
    text = (example_folder() / "README.md").read_text()
    (prompt,) = re.findall(r'"prompt": "([w\d ]+)"', text)
    (shown,) = re.findall(r"always\n`([w\d ]+)`", text)
    tokens = [[int(word[1:]) for word in each.split()] for each in (prompt, shown)]
    answer = ReferenceDecoder.load(make_checkpoint(4)).answer(tokens[0], len(tokens[1]))
    assert answer.tokens == tokens[1]
