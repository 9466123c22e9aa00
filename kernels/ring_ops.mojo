"""Registers the ops on tokens and ring: unpack, check sizes, dispatch."""

import extensibility
from extensibility import (
    InputTensor,
    OutputTensor,
    _MutableInputTensor as MutableInputTensor,
)
from std.math import ceildiv
from std.utils.index import IndexList
from max.gpu.host import DeviceContext

from .checks import check_batch, check_ring, check_shape
from .launch import launch
from .ragged_update import RaggedUpdate
from .ring import ring_len_of
from .ring_close import RingClose
from .seed_tail import SeedTail
from .tail_update import TailUpdate


@extensibility.register("mo.mla.kpool.seed_tail")
struct MLAKPoolSeedTail:
    """Registers `mo.mla.kpool.seed_tail` with the graph compiler."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        head_dim: Int,
        kpool: Int,
    ](
        tail: MutableInputTensor[dtype=dtype, rank=4, ...],
        k: InputTensor[dtype=dtype, rank=2, ...],
        gate: InputTensor[dtype=dtype, rank=2, ...],
        input_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=.uint32, rank=1, ...],
        slot_idx: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Leaves each prefill chunk's trailing tokens in the ring.

        Request `r` brings tokens `[input_row_offsets[r], input_row_offsets[r +
        1])` at positions from `cache_lengths[r]` on. Those of its unfinished
        pool are stashed in slot `slot_idx[r]`; nothing else is.

        Parameters:
            dtype: Element type of `tail`, `k` and `gate`.
            target: Device the op runs on.
            head_dim: Channels per key.
            kpool: Tokens per pool.

        Args:
            tail: The ring `[max_slots, 2, ring_len, head_dim]`, keys at 0 and
                gate scores at 1; updated in place.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            input_row_offsets: Token row offsets `[batch + 1]`.
            cache_lengths: Tokens cached before this call `[batch]`.
            slot_idx: Ring slots `[batch]`.
            ctx: Device context.

        Raises:
            Error: If sizes disagree or the ring is not dense; on a CPU also if
                offsets decrease or pass the token count, or if a slot is
                outside the ring or shared. Nothing is written then.
        """
        comptime OP = "seed_tail"
        var batch = slot_idx.dim_size(0)
        var rows = IndexList[2](k.dim_size(0), head_dim)
        check_shape(OP, "k", k.shape(), rows)
        check_shape(OP, "gate", gate.shape(), rows)
        check_batch(OP, input_row_offsets, cache_lengths, batch)
        check_ring[head_dim](OP, tail)
        var ring = tail.to_tile_tensor[.int64]()
        launch[target](
            SeedTail[
                dtype, head_dim, kpool, ring_len_of[ring.LayoutType, kpool]()
            ](
                ring,
                k.to_tile_tensor[.int64]().as_imm(),
                gate.to_tile_tensor[.int64]().as_imm(),
                input_row_offsets.to_tile_tensor[.int64]().as_imm(),
                cache_lengths.to_tile_tensor[.int64]().as_imm(),
                slot_idx.to_tile_tensor[.int64]().as_imm(),
                batch,
            ),
            ctx,
        )


@extensibility.register("mo.mla.kpool.tail_update")
struct MLAKPoolTailUpdate:
    """Registers `mo.mla.kpool.tail_update` with the graph compiler."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        head_dim: Int,
        kpool: Int,
        next_n: Int,
    ](
        pooled: OutputTensor[dtype=dtype, rank=3, ...],
        closed_pool: OutputTensor[dtype=.int32, rank=2, ...],
        tail: MutableInputTensor[dtype=dtype, rank=4, ...],
        k: InputTensor[dtype=dtype, rank=3, ...],
        gate: InputTensor[dtype=dtype, rank=3, ...],
        ape: InputTensor[dtype=.float32, rank=2, ...],
        positions: InputTensor[dtype=.int32, rank=2, ...],
        slot_idx: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Stashes each decoded token and closes the pools this completes.

        Parameters:
            dtype: Element type of `tail`, `k`, `gate` and `pooled`.
            target: Device the op runs on.
            head_dim: Channels per key.
            kpool: Tokens per pool.
            next_n: Tokens appended per row.

        Args:
            pooled: Output `[batch, ceil(next_n / kpool), head_dim]`: the keys
                of the pools each row closed, in order; zero where unused.
            closed_pool: Output `[batch, ceil(next_n / kpool)]`: their pool
                ids; -1 where unused.
            tail: The ring `[max_slots, 2, ring_len, head_dim]`, keys at 0 and
                gate scores at 1; updated in place.
            k: Keys `[batch, next_n, head_dim]`.
            gate: Gate scores `[batch, next_n, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            positions: Absolute positions `[batch, next_n]`; negative is
                padding. The real ones of a row are consecutive.
            slot_idx: Ring slots `[batch]`.
            ctx: Device context.

        Raises:
            Error: If sizes disagree or the ring is not dense; on a CPU also if
                positions are not consecutive, or if a slot is outside the ring
                or shared. Nothing is written then.
        """
        comptime OP = "tail_update"
        comptime COLUMNS = ceildiv(next_n, kpool)
        var batch = slot_idx.dim_size(0)
        var tokens = IndexList[3](batch, next_n, head_dim)
        check_shape(OP, "k", k.shape(), tokens)
        check_shape(OP, "gate", gate.shape(), tokens)
        check_shape(OP, "ape", ape.shape(), IndexList[2](kpool, head_dim))
        check_shape(
            OP, "positions", positions.shape(), IndexList[2](batch, next_n)
        )
        check_shape(
            OP, "pooled", pooled.shape(), IndexList[3](batch, COLUMNS, head_dim)
        )
        check_shape(
            OP, "closed_pool", closed_pool.shape(), IndexList[2](batch, COLUMNS)
        )
        check_ring[head_dim](OP, tail)
        var ring = tail.to_tile_tensor[.int64]()
        launch[target](
            TailUpdate[
                dtype,
                head_dim,
                kpool,
                next_n,
                ring_len_of[ring.LayoutType, kpool](),
            ](
                ring,
                pooled.to_tile_tensor[.int64](),
                closed_pool.to_tile_tensor[.int64](),
                k.to_tile_tensor[.int64]().as_imm(),
                gate.to_tile_tensor[.int64]().as_imm(),
                ape.to_tile_tensor[.int64]().as_imm(),
                positions.to_tile_tensor[.int64]().as_imm(),
                slot_idx.to_tile_tensor[.int64]().as_imm(),
                batch,
            ),
            ctx,
        )


@extensibility.register("mo.mla.kpool.ring_close")
struct MLAKPoolRingClose:
    """Registers `mo.mla.kpool.ring_close` with the graph compiler."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        head_dim: Int,
        kpool: Int,
    ](
        pooled: OutputTensor[dtype=dtype, rank=2, ...],
        closed_pool: OutputTensor[dtype=.int32, rank=1, ...],
        tail: MutableInputTensor[dtype=dtype, rank=4, ...],
        k: InputTensor[dtype=dtype, rank=2, ...],
        gate: InputTensor[dtype=dtype, rank=2, ...],
        ape: InputTensor[dtype=.float32, rank=2, ...],
        input_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=.uint32, rank=1, ...],
        slot_idx: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Closes the pool that each request had pending, if its chunk ends it.

        Parameters:
            dtype: Element type of `tail`, `k`, `gate` and `pooled`.
            target: Device the op runs on.
            head_dim: Channels per key.
            kpool: Tokens per pool.

        Args:
            pooled: Output `[batch, head_dim]`; zero where nothing closed.
            closed_pool: Output `[batch]`: the pool's id, or -1.
            tail: The ring `[max_slots, 2, ring_len, head_dim]`, only read.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            input_row_offsets: Token row offsets `[batch + 1]`.
            cache_lengths: Tokens cached before this call `[batch]`.
            slot_idx: Ring slots `[batch]`.
            ctx: Device context.

        Raises:
            Error: If sizes disagree or the ring is not dense; on a CPU also if
                offsets decrease or pass the token count, or if a slot is
                outside the ring or shared. Nothing is written then.
        """
        comptime OP = "ring_close"
        var batch = slot_idx.dim_size(0)
        var rows = IndexList[2](k.dim_size(0), head_dim)
        check_shape(OP, "k", k.shape(), rows)
        check_shape(OP, "gate", gate.shape(), rows)
        check_shape(OP, "ape", ape.shape(), IndexList[2](kpool, head_dim))
        check_batch(OP, input_row_offsets, cache_lengths, batch)
        check_ring[head_dim](OP, tail)
        var ring = tail.to_tile_tensor[.int64]()
        launch[target](
            RingClose[
                dtype, head_dim, kpool, ring_len_of[ring.LayoutType, kpool]()
            ](
                pooled.to_tile_tensor[.int64](),
                closed_pool.to_tile_tensor[.int64](),
                ring,
                k.to_tile_tensor[.int64]().as_imm(),
                gate.to_tile_tensor[.int64]().as_imm(),
                ape.to_tile_tensor[.int64]().as_imm(),
                input_row_offsets.to_tile_tensor[.int64]().as_imm(),
                cache_lengths.to_tile_tensor[.int64]().as_imm(),
                slot_idx.to_tile_tensor[.int64]().as_imm(),
                batch,
            ),
            ctx,
        )


@extensibility.register("mo.mla.kpool.ragged_update")
struct MLAKPoolRaggedUpdate:
    """Registers `mo.mla.kpool.ragged_update` with the graph compiler."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        head_dim: Int,
        kpool: Int,
    ](
        pooled: OutputTensor[dtype=dtype, rank=2, ...],
        closed_pool: OutputTensor[dtype=.int32, rank=1, ...],
        tail: MutableInputTensor[dtype=dtype, rank=4, ...],
        k: InputTensor[dtype=dtype, rank=2, ...],
        gate: InputTensor[dtype=dtype, rank=2, ...],
        ape: InputTensor[dtype=.float32, rank=2, ...],
        input_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=.uint32, rank=1, ...],
        slot_idx: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Closes, compresses and stashes a whole ragged step.

        Request `r`'s closed pools stand in order from output row
        `(input_row_offsets[r] + r * (kpool - 1)) // kpool` on.

        Parameters:
            dtype: Element type of `tail`, `k`, `gate` and `pooled`.
            target: Device the op runs on.
            head_dim: Channels per key.
            kpool: Tokens per pool.

        Args:
            pooled: Output `[rows, head_dim]` with `rows = (total_tokens + batch
                * (kpool - 1)) // kpool`; zero where unused.
            closed_pool: Output `[rows]`: the pool ids; -1 where unused.
            tail: The ring `[max_slots, 2, ring_len, head_dim]`, keys at 0 and
                gate scores at 1; updated in place.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            input_row_offsets: Token row offsets `[batch + 1]`.
            cache_lengths: Tokens cached before this call `[batch]`.
            slot_idx: Ring slots `[batch]`.
            ctx: Device context.

        Raises:
            Error: If sizes disagree or the ring is not dense; on a CPU also if
                offsets decrease or pass the token count, or if a slot is
                outside the ring or shared. Nothing is written then.
        """
        comptime OP = "ragged_update"
        var batch = slot_idx.dim_size(0)
        var rows = IndexList[2](k.dim_size(0), head_dim)
        check_shape(OP, "k", k.shape(), rows)
        check_shape(OP, "gate", gate.shape(), rows)
        check_shape(OP, "ape", ape.shape(), IndexList[2](kpool, head_dim))
        check_batch(OP, input_row_offsets, cache_lengths, batch)
        var room = (k.dim_size(0) + batch * (kpool - 1)) // kpool
        check_shape(OP, "pooled", pooled.shape(), IndexList[2](room, head_dim))
        check_shape(OP, "closed_pool", closed_pool.shape(), IndexList[1](room))
        check_ring[head_dim](OP, tail)
        var ring = tail.to_tile_tensor[.int64]()
        launch[target](
            RaggedUpdate[
                dtype, head_dim, kpool, ring_len_of[ring.LayoutType, kpool]()
            ](
                pooled.to_tile_tensor[.int64](),
                closed_pool.to_tile_tensor[.int64](),
                ring,
                k.to_tile_tensor[.int64]().as_imm(),
                gate.to_tile_tensor[.int64]().as_imm(),
                ape.to_tile_tensor[.int64]().as_imm(),
                input_row_offsets.to_tile_tensor[.int64]().as_imm(),
                cache_lengths.to_tile_tensor[.int64]().as_imm(),
                slot_idx.to_tile_tensor[.int64]().as_imm(),
                batch,
            ),
            ctx,
        )
