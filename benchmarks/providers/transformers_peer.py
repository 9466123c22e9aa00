"""What transformers' indexer does to its cache for one decoded token.

Calls transformers' own code: the token is concatenated to the layer's cache, and
`Glm5NextTextIndexer.get_pooled_states` builds every pooled key anew.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers.cache_utils import DynamicIndexedLayer
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from kpool_graph import reference

from ..cases import HEAD_DIM
from ..operands import Outcome, Problem
from .base import Prepared

NAME = "transformers"

# The first layer of that model with an indexer.
_LAYER = 3


def prepare(problem: Problem) -> Prepared:
    """Fills a cache up to the token that the step decodes.

    Args:
        problem: A case of one token at the end of a context, closing its pool.

    Returns:
        Its step. Verified is the pool that the token closes; the rebuild has no ring.
    """
    torch.set_grad_enabled(False)
    case, given = problem.case, problem.operands
    config = Glm5NextTextConfig(
        hidden_size=64,
        q_lora_rank=32,
        index_n_heads=4,
        index_head_dim=HEAD_DIM,
        index_kpool=case.kpool,
        num_hidden_layers=_LAYER + 1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=100,
    )
    indexer = Glm5NextTextIndexer(config, layer_idx=_LAYER)
    indexer.index_kpool_compress_ape.copy_(torch.from_numpy(given["ape"].copy()))

    rng = np.random.default_rng(1)
    context = rng.standard_normal((case.n - 1, 2, HEAD_DIM), np.float32)
    # The members of the last pool are those that ours finds in the ring.
    slot = given["tail"][given["slot_idx"][0]]
    waiting = case.kpool - 1
    context[case.n - 1 - waiting :] = slot[:, :waiting].transpose(1, 0, 2)
    cached = _pack(context)
    token = _pack(np.stack([given["k"][0], given["gate"][0]], axis=1))
    layer = DynamicIndexedLayer()
    layer.lazy_initialization_indexer(cached)

    def step() -> torch.Tensor:
        layer.indexer_keys = cached
        pooled, _, _ = indexer.get_pooled_states(layer.update_indexer(token))
        return pooled

    def read(pooled: torch.Tensor) -> Outcome:
        # No ring and no ids to compare: the pools' count and the last pool are it.
        if pooled.shape[1] != case.n // case.kpool:
            raise ValueError(f"{pooled.shape[1]} pools of {case.n} tokens")
        return Outcome(
            reference.values(pooled[0, -1:, :].numpy())[None],
            problem.expected.ints,
            problem.expected.tail,
        )

    return Prepared(step, read)


def _pack(tokens: np.ndarray) -> torch.Tensor:
    """Packs `[tokens, 2, head_dim]` as the indexer's cache does, a valid flag last."""
    flat = torch.from_numpy(tokens.reshape(1, len(tokens), 2 * HEAD_DIM))
    return torch.cat([flat, torch.ones((1, len(tokens), 1))], dim=-1)
