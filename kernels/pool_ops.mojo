"""Registers the ops that need no ring: unpack, check sizes, dispatch."""

import extensibility
from extensibility import InputTensor, OutputTensor
from std.utils.index import IndexList
from max.gpu.host import DeviceContext

from .checks import check_batch, check_shape
from .compress import Compress
from .expand_topk import ExpandTopk
from .launch import launch


@extensibility.register("mo.mla.kpool.compress")
struct MLAKPoolCompress:
    """Registers `mo.mla.kpool.compress` with the graph compiler."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        head_dim: Int,
        kpool: Int,
    ](
        pooled: OutputTensor[dtype=dtype, rank=2, ...],
        k: InputTensor[dtype=dtype, rank=2, ...],
        gate: InputTensor[dtype=dtype, rank=2, ...],
        ape: InputTensor[dtype=.float32, rank=2, ...],
        input_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
        pool_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Pools the tokens whose pools arrive whole in this call.

        Parameters:
            dtype: Element type of `k`, `gate` and `pooled`.
            target: Device the op runs on.
            head_dim: Channels per key.
            kpool: Tokens per pool.

        Args:
            pooled: Output `[total_tokens // kpool, head_dim]`; rows past the
                last pool become zero.
            k: Keys `[total_tokens, head_dim]`.
            gate: Gate scores `[total_tokens, head_dim]`.
            ape: Within-pool position embedding `[kpool, head_dim]`.
            input_row_offsets: Token row offsets `[batch + 1]`.
            pool_row_offsets: Output row offsets `[batch + 1]`.
            cache_lengths: Tokens cached before this call `[batch]`.
            ctx: Device context.

        Raises:
            Error: If sizes disagree; on a CPU also if offsets decrease or pass
                the token count, or if the pool row offsets are not the sums of
                the pools completed. Nothing is written then.
        """
        comptime OP = "compress"
        var batch = cache_lengths.dim_size(0)
        var rows = IndexList[2](k.dim_size(0), head_dim)
        check_shape(OP, "k", k.shape(), rows)
        check_shape(OP, "gate", gate.shape(), rows)
        check_shape(OP, "ape", ape.shape(), IndexList[2](kpool, head_dim))
        check_batch(OP, input_row_offsets, cache_lengths, batch)
        check_shape(
            OP,
            "pool_row_offsets",
            pool_row_offsets.shape(),
            IndexList[1](batch + 1),
        )
        launch[target](
            Compress[dtype, head_dim, kpool](
                pooled.to_tile_tensor[.int64](),
                k.to_tile_tensor[.int64]().as_imm(),
                gate.to_tile_tensor[.int64]().as_imm(),
                ape.to_tile_tensor[.int64]().as_imm(),
                input_row_offsets.to_tile_tensor[.int64]().as_imm(),
                pool_row_offsets.to_tile_tensor[.int64]().as_imm(),
                cache_lengths.to_tile_tensor[.int64]().as_imm(),
                batch,
            ),
            ctx,
        )


@extensibility.register("mo.mla.kpool.expand_topk")
struct MLAKPoolExpandTopk:
    """Registers `mo.mla.kpool.expand_topk` with the graph compiler."""

    @staticmethod
    def execute[
        target: StaticString,
        kpool: Int,
        pool_topk: Int,
        always_select_tail: Bool,
    ](
        selected: OutputTensor[dtype=.int32, rank=2, ...],
        pool_ids: InputTensor[dtype=.int32, rank=2, ...],
        input_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
        cache_lengths: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Expands selected pools to the token positions they cover, packed.

        Parameters:
            target: Device the op runs on.
            kpool: Tokens per pool.
            pool_topk: Selected pools per query.
            always_select_tail: Whether the newest positions, which no complete
                pool covers, are selected too.

        Args:
            selected: Output `[total_tokens, pool_topk * kpool (+ kpool - 1)]`:
                positions in selection order, then the newest ones, then -1.
            pool_ids: Selected pools `[total_tokens, pool_topk]`; a negative id,
                or one not complete for its query, selects nothing.
            input_row_offsets: Token row offsets `[batch + 1]`.
            cache_lengths: Tokens cached before this call `[batch]`.
            ctx: Device context.

        Raises:
            Error: If sizes disagree; on a CPU also if offsets decrease or pass
                the token count. Nothing is written then.
        """
        comptime OP = "expand_topk"
        comptime Call = ExpandTopk[kpool, pool_topk, always_select_tail]
        var batch = cache_lengths.dim_size(0)
        var rows = pool_ids.dim_size(0)
        check_shape(
            OP, "pool_ids", pool_ids.shape(), IndexList[2](rows, pool_topk)
        )
        check_shape(
            OP, "selected", selected.shape(), IndexList[2](rows, Call.COLUMNS)
        )
        check_batch(OP, input_row_offsets, cache_lengths, batch)
        launch[target](
            Call(
                selected.to_tile_tensor[.int64](),
                pool_ids.to_tile_tensor[.int64]().as_imm(),
                input_row_offsets.to_tile_tensor[.int64]().as_imm(),
                cache_lengths.to_tile_tensor[.int64]().as_imm(),
                batch,
            ),
            ctx,
        )
