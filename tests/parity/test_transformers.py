"""KPoolIndexer selects what `Glm5NextTextIndexer` of transformers selects.

transformers rebuilds every pool from all tokens in one forward, whose row t is the
selection of the query at t. Ours carries a ring and pooled keys from call to call.

Needs torch and transformers 5.24 or newer, so the default test run leaves this
folder out: `python -m pytest tests/parity`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from max.graph.weights import load_weights
from safetensors.torch import save_file
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from indexers import PATHS, Indexer, Judge, Server, compile_indexers
from kpool_graph.reference_indexer import pool_scores
from models import Array

PROMPTS = (1, 2, 3, 4, 7, 31, 64, 129, 254, 300)
DECODE_STEPS = 100
SLOTS = (7, 0, 12, 3, 9, 1, 10, 4, 11, 6)
MAX_SLOTS = 13
PREFIX = "model.layers.3.self_attn.indexer."
INDEXER = Indexer("parity")

# Scores are of order 1. Each side sums some 600 float32 products a score in an order
# of its own, and is off by up to SCORE_ERROR: a test holds transformers to that. Two
# scores on two sides can change places where they are less than four errors apart.
SCORE_ERROR = 2.5e-6
EPSILON = 4 * SCORE_ERROR
# A hundred scores spread over a range of 1 leave one query in a thousand that close.
MOST_NEAR_TIES = 0.002


@dataclass
class Oracle:
    """What transformers selects for every query of a batch of requests.

    Attributes:
        hidden: `[tokens, hidden_size]` of each request.
        q_resid: `[tokens, q_lora_rank]` of each request.
        selected: Token positions by (request, position).
        scores: `[pools]` of the query's complete pools, likewise, as transformers
            computed them.
    """

    hidden: list[Array]
    q_resid: list[Array]
    selected: dict[tuple[int, int], frozenset[int]]
    scores: dict[tuple[int, int], Array]


def transformers_indexer() -> Glm5NextTextIndexer:
    config = Glm5NextTextConfig(
        hidden_size=INDEXER.hidden_size,
        q_lora_rank=INDEXER.q_lora_rank,
        index_n_heads=INDEXER.n_heads,
        index_head_dim=INDEXER.head_dim,
        index_topk=INDEXER.index_topk,
        index_kpool=INDEXER.kpool,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=100,
    )
    indexer = Glm5NextTextIndexer(config, layer_idx=3)
    weights = INDEXER.random_weights(np.random.default_rng(0))
    indexer.load_state_dict(
        {name: torch.from_numpy(value) for name, value in weights.items()}
    )
    return indexer


def ask_transformers(
    indexer: Glm5NextTextIndexer, hidden: list[Array], q_resid: list[Array]
) -> Oracle:
    """Runs one forward over left-padded requests."""
    longest = max(map(len, hidden))
    padding = [longest - len(tokens) for tokens in hidden]
    mask = torch.zeros((len(hidden), longest), dtype=torch.bool)
    padded = []
    for sequences in (hidden, q_resid):
        batch = torch.full((len(hidden), longest, sequences[0].shape[1]), 9.0)
        for request, tokens in enumerate(sequences):
            batch[request, padding[request] :] = torch.from_numpy(tokens)
            mask[request, padding[request] :] = True
        padded.append(batch)

    recorded: list[torch.Tensor] = []
    topk = torch.Tensor.topk

    def recording_topk(self: torch.Tensor, *args: int, **kwargs: int) -> object:
        recorded.append(self.clone())
        return topk(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", recording_topk)
        rows = indexer(*padded, mask, None).numpy()
    (scores,) = recorded

    oracle = Oracle(hidden, q_resid, {}, {})
    for request, tokens in enumerate(hidden):
        for position in range(len(tokens)):
            row = rows[request, padding[request] + position]
            chosen = row[row >= 0] - padding[request]
            pools = (position + 1) // INDEXER.kpool
            query = request, position
            oracle.selected[query] = frozenset(chosen.tolist())
            oracle.scores[query] = (
                scores[request, padding[request] + position, :pools].double().numpy()
            )
    return oracle


@pytest.fixture(scope="module", params=[1, 2, 3], ids="seed{}".format)
def oracle(request: pytest.FixtureRequest) -> Oracle:
    rng = np.random.default_rng(request.param)

    def draw(size: int) -> list[Array]:
        return [
            rng.standard_normal((prompt + DECODE_STEPS, size)).astype(np.float32)
            for prompt in PROMPTS
        ]

    return ask_transformers(
        transformers_indexer(), draw(INDEXER.hidden_size), draw(INDEXER.q_lora_rank)
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The module's weights, read from a file that transformers' names are in."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    state = transformers_indexer().state_dict()
    save_file({PREFIX + name: value for name, value in state.items()}, path)
    return INDEXER.module().read_weights(load_weights([path]), PREFIX)


@pytest.fixture(scope="module")
def models(checkpoint):
    paths = (*PATHS, "decode1")
    return compile_indexers({INDEXER: (checkpoint, paths)})[INDEXER]


def serve(models, oracle: Oracle) -> Server:
    return Server(INDEXER, models, oracle.hidden, oracle.q_resid, SLOTS, MAX_SLOTS)


def prefill(server: Server, path: str = "ragged") -> None:
    server.ragged(dict(enumerate(PROMPTS)), path)


def live(server: Server) -> Iterator[int]:
    return (request for request in range(len(PROMPTS)) if server.left(request))


def compare(server: Server, oracle: Oracle) -> Judge:
    """Requires every query of every request to select what transformers selects."""
    judge = Judge(INDEXER, EPSILON)
    assert server.selected.keys() == oracle.selected.keys()
    for query, want in oracle.selected.items():
        judge.judge(*query, server.selected[query], want, oracle.scores[query])
    print(f"{judge.queries} queries, near-ties: {judge.near_ties}")
    assert judge.queries == sum(PROMPTS) + DECODE_STEPS * len(PROMPTS)
    assert len(judge.near_ties) <= MOST_NEAR_TIES * judge.queries
    return judge


@pytest.mark.parametrize("path", ["ragged", "three_ops"])
def test_prompts_and_one_hundred_ragged_decode_steps(models, oracle, path):
    server = serve(models, oracle)
    prefill(server, path)
    for _ in range(DECODE_STEPS):
        server.ragged(dict.fromkeys(range(len(PROMPTS)), 1), path)
    compare(server, oracle)


def test_prompts_and_one_hundred_uniform_decode_steps(models, oracle):
    server = serve(models, oracle)
    prefill(server)
    for _ in range(DECODE_STEPS):
        server.decode([(request, 1) for request in range(len(PROMPTS))], 1)
    compare(server, oracle)


def test_prompts_and_wide_steps_with_padded_rows(models, oracle):
    rng = np.random.default_rng(4)
    server = serve(models, oracle)
    prefill(server)
    while requests := list(live(server)):
        rows: list[tuple[int | None, int]] = [
            (request, min(int(rng.integers(1, 4)), server.left(request)))
            for request in rng.permutation(requests).tolist()
        ]
        rows.insert(int(rng.integers(len(rows) + 1)), (None, 0))
        server.decode(rows, 3)
    compare(server, oracle)


def test_chunked_prefill_mixed_with_decodes(models, oracle):
    rng = np.random.default_rng(5)
    server = serve(models, oracle)
    sizes = (0, 1, 1, 1, 2, 3, 4, 5, 8, 13, 40)
    while requests := list(live(server)):
        batch = rng.permutation(requests)[: rng.integers(1, len(requests) + 1)]
        counts = {
            request: min(int(rng.choice(sizes)), server.left(request))
            for request in batch.tolist()
        }
        server.ragged(counts, str(rng.choice(["ragged", "three_ops"])))
    compare(server, oracle)


def test_a_swapped_ape_row_is_noticed(checkpoint, oracle):
    name = "index_kpool_compress_ape"
    ape = checkpoint[name].to_numpy().copy()
    ape[[1, 2]] = ape[[2, 1]]
    swapped = {**checkpoint, name: ape}
    models = compile_indexers({INDEXER: (swapped, (*PATHS, "decode1"))})[INDEXER]
    server = serve(models, oracle)
    server.ragged({request: server.left(request) for request in live(server)})
    with pytest.raises(AssertionError, match=r"request .*, position "):
        compare(server, oracle)


def test_a_row_of_transformers_does_not_depend_on_later_tokens(oracle):
    indexer = transformers_indexer()
    for tokens in (1, 4, 37, 101):
        hidden = [each[:tokens] for each in oracle.hidden]
        q_resid = [each[:tokens] for each in oracle.q_resid]
        cut = ask_transformers(indexer, hidden, q_resid)
        judge = Judge(INDEXER, EPSILON)
        for request in range(len(PROMPTS)):
            query = request, tokens - 1
            judge.judge(
                *query,
                cut.selected[query],
                oracle.selected[query],
                oracle.scores[query],
            )


def test_the_numpy_reference_scores_as_transformers_does(oracle):
    weights = INDEXER.random_weights(np.random.default_rng(0))
    for request, tokens in enumerate(oracle.hidden):
        scores = pool_scores(
            tokens, oracle.q_resid[request], weights, kpool=INDEXER.kpool
        )
        for position, row in enumerate(scores):
            want = oracle.scores[request, position]
            complete = np.isfinite(row)
            assert np.count_nonzero(complete) == len(want)
            np.testing.assert_allclose(row[complete], want, rtol=0, atol=SCORE_ERROR)
