"""The k-pooled indexer in float64 NumPy and plain loops, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .reference import Array, Float64Array, pool
from .reference_ragged import Int32Array, expand_topk

_NORM_EPSILON = 1e-6


def _exact(values: Array) -> Array:
    return values


def pool_scores(
    hidden: Array,
    q_resid: Array,
    weights: Mapping[str, Array],
    *,
    kpool: int,
    stored: Callable[[Array], Array] = _exact,
) -> Float64Array:
    """Scores every pool of a request for every one of its tokens.

    Args:
        hidden: `[tokens, hidden_size]`, from position 0 on.
        q_resid: `[tokens, q_lora_rank]`.
        weights: By the names that `KPoolIndexer` gives them.
        kpool: Tokens per pool.
        stored: Rounds values as the dtype that holds projections, keys and pooled
            keys does; no rounding if not given.

    Returns:
        `[tokens, tokens // kpool]` float64; -inf where the pool is not complete for
        the token.
    """
    exact = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    ape = exact["index_kpool_compress_ape"]
    key = stored(hidden @ exact["wk.weight"].T)
    gate = stored(hidden @ exact["index_kpool_compress_gate"].T)
    key = stored(_norm(key, exact["k_norm.weight"], exact["k_norm.bias"]))
    weight = stored(hidden @ exact["weights_proj.weight"].T)
    head_dim, n_heads = key.shape[1], weight.shape[1]
    query = stored(q_resid @ exact["wq_b.weight"].T).reshape(-1, n_heads, head_dim)

    scores = np.full((len(hidden), len(hidden) // kpool), -np.inf)
    for pool_id in range(scores.shape[1]):
        end = (pool_id + 1) * kpool
        members = slice(end - kpool, end)
        pooled = stored(pool(key[members], gate[members], ape))
        similar = np.maximum(query[end - 1 :] @ pooled * head_dim**-0.5, 0)
        score = (weight[end - 1 :] * similar).sum(axis=1) * n_heads**-0.5
        scores[end - 1 :, pool_id] = score
    return scores


def select(
    scores: Array, *, index_topk: int, kpool: int, always_select_tail: bool = True
) -> Int32Array:
    """Selects token positions for every token of a request.

    Args:
        scores: `[tokens, pools]`; -inf where a pool is not complete.
        index_topk: Tokens selected by score, a multiple of `kpool`.
        kpool: Tokens per pool.
        always_select_tail: Whether positions that no complete pool covers follow.

    Returns:
        `[tokens, index_topk]` int32 positions, `kpool - 1` columns more with
        `always_select_tail`; best pool first, the lower id first among equals.
    """
    tokens, pools = scores.shape
    pool_ids = np.full((tokens, index_topk // kpool), -1, np.int32)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : pool_ids.shape[1]]
    pool_ids[:, : min(pools, pool_ids.shape[1])] = best
    return expand_topk(
        pool_ids,
        np.array([0, tokens]),
        np.array([0]),
        kpool=kpool,
        always_select_tail=always_select_tail,
    )


def _norm(values: Array, weight: Array, bias: Array) -> Array:
    centred = values - values.mean(axis=1, keepdims=True)
    variance = (centred**2).mean(axis=1, keepdims=True)
    return np.asarray(centred / np.sqrt(variance + _NORM_EPSILON) * weight + bias)
