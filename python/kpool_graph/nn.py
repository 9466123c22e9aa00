"""The k-pooled DSA indexer as a MAX module that owns its weights.

A query reads `index_topk // kpool` pools, chosen by

    score[p] = sum_h weight[h] * relu(head_dim**-0.5 * <q[h], pooled[p]>)

with `weight = n_heads**-0.5 * weights_proj(hidden)`. The formula, the weights and
their names are those of `Glm5NextTextIndexer` in Hugging Face transformers.
"""

from __future__ import annotations

from max.driver import Buffer
from max.dtype import DType
from max.graph import (
    BufferValue,
    DeviceRef,
    TensorValue,
    Weight,
    ops,
)
from max.graph.weights import Weights
from max.nn.kernels import scatter_nd_skip_oob_indices
from max.nn.layer import Module
from max.nn.linear import Linear
from max.nn.norm import LayerNorm

from ._closing import close_ragged
from ._rows import count, owners_of, spread
from ._validate import RING_DTYPES, Problems
from .buffers import to_buffer, to_numpy
from .ops import tail_update
from .pools import expand_topk

INDEXER_DTYPES = (DType.float32, DType.bfloat16)
_NORM_EPSILON = 1e-6


class KPoolIndexer(Module):
    """Selects the token positions that each query of a sparse attention reads.

    Every step updates two buffers that outlive it and that the caller keeps: the
    ring, and one key for each complete pool of each slot. `__call__` takes a ragged
    step, `decode` a uniform one; they may alternate, and select alike. Give the
    module its weights before the first of either: `load_state_dict` names them.

    A step gathers `[queries, max_pools, head_dim]` and writes all pooled keys back,
    so its memory and time grow with `max_pools`: cut long prompts into chunks.

    Attributes:
        pools_selected: Pools that a query selects, `index_topk // kpool`.
        selection_width: Columns of a selection: `index_topk`, and `kpool - 1` more
            with `always_select_tail`.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        q_lora_rank: int,
        n_heads: int,
        head_dim: int,
        index_topk: int,
        kpool: int,
        always_select_tail: bool = True,
        dtype: DType = DType.bfloat16,
        device: DeviceRef | None = None,
    ) -> None:
        """Declares the weights.

        Args:
            hidden_size: Channels of the hidden states.
            q_lora_rank: Channels of the query residual.
            n_heads: Heads of the indexer.
            head_dim: Channels of a head, of a key and of a pooled key.
            index_topk: Tokens that a query selects by score, a multiple of `kpool`.
            kpool: Tokens per pool.
            always_select_tail: Whether a query also selects its newest tokens that
                no complete pool covers.
            dtype: float32 or bfloat16, of the projections, the hidden states, the
                ring and the pooled keys.
            device: Where the module runs; the CPU if not given.

        Raises:
            OperandError: If a size or the dtype is not one of these.
        """
        super().__init__()
        problems = Problems("KPoolIndexer")
        for name, size in (
            ("hidden_size", hidden_size),
            ("q_lora_rank", q_lora_rank),
            ("n_heads", n_heads),
            ("head_dim", head_dim),
            ("index_topk", index_topk),
            ("kpool", kpool),
        ):
            problems.require_at_least(name, size, 1)
        problems.require_multiple("index_topk", index_topk, "kpool", kpool)
        problems.require_dtype("dtype", dtype, INDEXER_DTYPES)
        problems.raise_if_any()

        self.kpool, self.head_dim, self.n_heads = kpool, head_dim, n_heads
        self.hidden_size, self.q_lora_rank = hidden_size, q_lora_rank
        self.always_select_tail = always_select_tail
        self.pools_selected = index_topk // kpool
        self.selection_width = index_topk + (kpool - 1) * always_select_tail
        self.dtype, self.device = dtype, device or DeviceRef.CPU()

        self.wq_b = Linear(q_lora_rank, n_heads * head_dim, dtype, self.device)
        self.wk = Linear(hidden_size, head_dim, dtype, self.device)
        self.k_norm = LayerNorm(
            head_dim, [self.device], DType.float32, eps=_NORM_EPSILON
        )
        self.weights_proj = Linear(hidden_size, n_heads, dtype, self.device)
        self.index_kpool_compress_gate = Weight(
            "index_kpool_compress_gate", dtype, (head_dim, hidden_size), self.device
        )
        self.index_kpool_compress_ape = Weight(
            "index_kpool_compress_ape", DType.float32, (kpool, head_dim), self.device
        )

    def read_weights(self, weights: Weights, prefix: str = "") -> dict[str, Buffer]:
        """Reads this module's weights from a checkpoint.

        Each is copied and cast to the dtype that the module declares: float32 for
        `k_norm` and `index_kpool_compress_ape`, `dtype` for the others.

        Args:
            weights: The checkpoint: `max.graph.weights.load_weights(paths)`.
            prefix: What stands before the module's own names, with the last dot,
                such as `model.layers.3.self_attn.indexer.`.

        Returns:
            The values by name, for `load_state_dict`.

        Raises:
            OperandError: If a weight is missing, or of another shape, or of a dtype
                that is not float32, float16 or bfloat16.
        """
        problems = Problems("KPoolIndexer.read_weights")
        state: dict[str, Buffer] = {}
        for name, declared in self.raw_state_dict().items():
            source = weights[prefix + name]
            if not source.exists():
                problems.add(f"the checkpoint must have {prefix}{name}, and does not")
                continue
            data = source.data()
            shape = [int(size) for size in data.shape]
            wanted = [int(size) for size in declared.shape]
            if shape != wanted:
                problems.add(f"{prefix}{name}.shape must be {wanted}, got {shape}")
            problems.require_dtype(f"{prefix}{name}.dtype", data.dtype, RING_DTYPES)
            if data.dtype in RING_DTYPES:
                state[name] = to_buffer(to_numpy(data.to_buffer()), declared.dtype)
        problems.raise_if_any()
        return state

    def __call__(
        self,
        tail: BufferValue,
        pooled_keys: BufferValue,
        hidden: TensorValue,
        q_resid: TensorValue,
        input_row_offsets: TensorValue,
        cache_lengths: TensorValue,
        slot_idx: TensorValue,
        *,
        three_ops: bool = False,
    ) -> TensorValue:
        """Takes a ragged step: any mix of prefill chunks and decodes.

        Args:
            tail: `[max_slots, 2, ring_len, head_dim]`, the ring; updated in place.
            pooled_keys: `[max_slots, max_pools, head_dim]`, dtype of the ring, the
                key of pool `p` at `p` of the request's slot; updated in place. A
                slot needs no clearing. Pools from `max_pools` on are neither kept
                nor selected: give a request at most `max_pools * kpool` tokens.
            hidden: `[total_tokens, hidden_size]` hidden states, dtype of the ring.
            q_resid: `[total_tokens, q_lora_rank]` query residual, dtype of the ring:
                what the attention's own query projection starts from.
            input_row_offsets: `[batch + 1]` uint32, first token row of each request.
            cache_lengths: `[batch]` uint32, tokens before this step.
            slot_idx: `[batch]` uint32, slot of each request.
            three_ops: Whether `ring_close`, `compress` and `seed_tail` do the step in
                place of `ragged_update`. The selection is the same, but no token of
                the step may be rejected.

        Returns:
            `[total_tokens, selection_width]` int32 token positions: those of the
            selected pools, best first, then with `always_select_tail` the query's
            newest, then -1. Rows that belong to no request are -1.

        Raises:
            OperandError: If an operand's kind, dtype, rank, size or device is wrong.
            KernelBuildError: If the kernels cannot be compiled.

        What the ops refuse while the graph runs is refused here too, before a buffer
        changes: see `kpool_graph.ragged_update`.
        """
        problems = self._check_buffers(tail, pooled_keys)
        problems.require_tensor("hidden", hidden, ("total_tokens", "hidden_size"))
        problems.require_tensor("q_resid", q_resid, ("total_tokens", "q_lora_rank"))
        problems.require_offsets("input_row_offsets", input_row_offsets, cache_lengths)
        for name, table in (("cache_lengths", cache_lengths), ("slot_idx", slot_idx)):
            problems.require_tensor(name, table, ("batch",), DType.uint32)
        problems.raise_if_any()

        k, gate = self._keys(hidden)
        tables = (input_row_offsets, cache_lengths, slot_idx)
        closed = close_ragged(
            tail,
            k,
            gate,
            self.index_kpool_compress_ape,
            *tables,
            kpool=self.kpool,
            three_ops=three_ops,
        )
        self._store(pooled_keys, *closed)

        first, cached, slots = (ops.cast(table, DType.int64) for table in tables)
        rows = count(hidden.shape[0], first)
        owners = owners_of(first, rows)
        before_first = cached - ops.rebind(first[:-1], cached.shape)
        return self._select(
            pooled_keys,
            hidden,
            q_resid,
            ops.unsqueeze(spread(before_first, owners) + rows, 1),
            spread(slots, owners),
        )

    def decode(
        self,
        tail: BufferValue,
        pooled_keys: BufferValue,
        hidden: TensorValue,
        q_resid: TensorValue,
        positions: TensorValue,
        slot_idx: TensorValue,
    ) -> TensorValue:
        """Takes a uniform step of `next_n` tokens a row, some of them padding.

        After a step whose tokens may be rejected, go on at the first rejected
        position, under the terms of `kpool_graph.tail_update`.

        Args:
            tail: As in a ragged step; updated in place.
            pooled_keys: As in a ragged step; updated in place.
            hidden: `[batch, next_n, hidden_size]` hidden states, dtype of the ring.
            q_resid: `[batch, next_n, q_lora_rank]` query residual, dtype of the ring.
            positions: `[batch, next_n]` int32, absolute position of each token;
                negative marks padding.
            slot_idx: `[batch]` uint32, slot of each row. Without effect on a row
                that is padding only.

        Returns:
            `[batch, next_n, selection_width]` int32 token positions as in a ragged
            step; -1 for padding.

        Raises:
            OperandError: If an operand's kind, dtype, rank, size or device is wrong.
            KernelBuildError: If the kernels cannot be compiled.
        """
        problems = self._check_buffers(tail, pooled_keys)
        tokens = ("batch", "next_n")
        problems.require_tensor("hidden", hidden, (*tokens, "hidden_size"))
        problems.require_tensor("q_resid", q_resid, (*tokens, "q_lora_rank"))
        problems.require_tensor("positions", positions, tokens, DType.int32)
        problems.require_tensor("slot_idx", slot_idx, ("batch",), DType.uint32)
        problems.require_static("next_n", 1)
        problems.raise_if_any()

        batch, next_n, _ = hidden.shape
        hidden = ops.reshape(hidden, (batch * next_n, self.hidden_size))
        q_resid = ops.reshape(q_resid, (batch * next_n, self.q_lora_rank))
        k, gate = self._keys(hidden)
        pooled, closed_pool = tail_update(
            tail,
            ops.reshape(k, (batch, next_n, self.head_dim)),
            ops.reshape(gate, (batch, next_n, self.head_dim)),
            self.index_kpool_compress_ape,
            positions,
            slot_idx,
            kpool=self.kpool,
        )
        columns = closed_pool.shape[1]
        slots = ops.cast(slot_idx, DType.int64)
        self._store(
            pooled_keys,
            ops.reshape(pooled, (batch * columns, self.head_dim)),
            ops.reshape(closed_pool, (batch * columns,)),
            ops.reshape(
                ops.broadcast_to(ops.unsqueeze(slots, 1), (batch, columns)),
                (batch * columns,),
            ),
        )
        selected = self._select(
            pooled_keys, hidden, q_resid, ops.cast(positions, DType.int64), slots
        )
        return ops.reshape(selected, (batch, next_n, self.selection_width))

    def _check_buffers(self, tail: object, pooled_keys: object) -> Problems:
        problems = Problems("KPoolIndexer")
        problems.expect(
            self.dtype,
            self.device,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            q_lora_rank=self.q_lora_rank,
        )
        problems.require_ring(tail, self.kpool)
        problems.require_buffer(
            "pooled_keys", pooled_keys, ("max_slots", "max_pools", "head_dim")
        )
        problems.require_static("max_pools", self.pools_selected)
        return problems

    def _keys(self, hidden: TensorValue) -> tuple[TensorValue, TensorValue]:
        gate_weight = ops.transpose(self.index_kpool_compress_gate, 0, 1)
        return self.k_norm(self.wk(hidden)), hidden @ gate_weight

    def _store(
        self,
        pooled_keys: BufferValue,
        pooled: TensorValue,
        closed_pool: TensorValue,
        slots: TensorValue,
    ) -> None:
        """Writes closed pools `[rows, head_dim]` at their slots and pool ids."""
        pools = ops.cast(closed_pool, DType.int64)
        # The scatter skips what lies past the end, but counts -1 from there.
        past = ops.constant(int(pooled_keys.shape[1]), DType.int64, self.device)
        pools = ops.where(pools < 0, past, pools)
        stored = scatter_nd_skip_oob_indices(
            ops.buffer_load(pooled_keys), pooled, ops.stack([slots, pools], axis=1)
        )
        ops.buffer_store(pooled_keys, stored)

    def _select(
        self,
        pooled_keys: BufferValue,
        hidden: TensorValue,
        q_resid: TensorValue,
        positions: TensorValue,
        slots: TensorValue,
    ) -> TensorValue:
        """Selects for `rows * n` queries.

        Args:
            pooled_keys: `[max_slots, max_pools, head_dim]`.
            hidden: `[rows * n, hidden_size]`.
            q_resid: `[rows * n, q_lora_rank]`.
            positions: `[rows, n]` int64; negative for padding.
            slots: `[rows]` int64; any number where all of the row is padding.

        Returns:
            `[rows * n, selection_width]` int32.
        """
        rows, n = positions.shape
        heads, queries = self.n_heads, rows * n
        max_slots, max_pools, head_dim = pooled_keys.shape
        last_slot = TensorValue(max_slots).to(self.device) - 1
        slots = ops.min(ops.max(slots, 0), last_slot)
        keys = ops.gather(ops.buffer_load(pooled_keys), slots, axis=0)
        q = ops.reshape(self.wq_b(q_resid), (rows, n * heads, head_dim))
        weights = self.weights_proj(hidden)
        similar = _float32(q) @ ops.transpose(_float32(keys), 1, 2)
        similar = ops.relu(similar * self.head_dim**-0.5)
        similar = ops.reshape(similar, (queries, heads, max_pools))
        weights = ops.reshape(_float32(weights) * heads**-0.5, (queries, heads, 1))
        scores = ops.squeeze(ops.sum(weights * similar, axis=1), 1)

        position = ops.reshape(positions, (queries,))
        last_member = count(max_pools, position) * self.kpool + (self.kpool - 1)
        complete = ops.unsqueeze(last_member, 0) <= ops.unsqueeze(position, 1)
        # top_k has no order for NaN, which is what a query that is not finite scores.
        eligible = ops.logical_and(complete, ops.logical_not(ops.is_nan(scores)))
        lowest = ops.constant(float("-inf"), DType.float32, self.device)
        _, pool_ids = ops.top_k(
            ops.where(eligible, scores, lowest), self.pools_selected
        )
        # Each query is a request of one token here: rows of one step may be padding.
        selected = expand_topk(
            ops.cast(pool_ids, DType.int32),
            ops.cast(count(queries + 1, position), DType.uint32),
            ops.cast(ops.max(position, 0), DType.uint32),
            kpool=self.kpool,
            always_select_tail=self.always_select_tail,
        )
        nothing = ops.constant(-1, DType.int32, self.device)
        return ops.where(ops.unsqueeze(position < 0, 1), nothing, selected)


def _float32(value: TensorValue) -> TensorValue:
    return ops.cast(value, DType.float32)
