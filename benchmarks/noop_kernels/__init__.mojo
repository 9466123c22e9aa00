"""Ops that do nothing: what a graph costs before any kernel works.

Each has the mutable ring and the outputs of the ops it stands for, of any rank, and
leaves the outputs as they are.
"""

import extensibility
from extensibility import (
    InputTensor,
    OutputTensor,
    _MutableInputTensor as MutableInputTensor,
)
from max.gpu.host import DeviceContext


@extensibility.register("kpool_graph.noop.close")
struct NoopClose:
    """Stands for `tail_update` and `ragged_update`."""

    @staticmethod
    def execute[
        dtype: DType,
        pooled_rank: Int,
        ids_rank: Int,
        rank: Int,
        table_dtype: DType,
        table_rank: Int,
        //,
        target: StaticString,
    ](
        pooled: OutputTensor[dtype=dtype, rank=pooled_rank, ...],
        closed_pool: OutputTensor[dtype=.int32, rank=ids_rank, ...],
        tail: MutableInputTensor[dtype=dtype, rank=4, ...],
        k: InputTensor[dtype=dtype, rank=rank, ...],
        gate: InputTensor[dtype=dtype, rank=rank, ...],
        ape: InputTensor[dtype=.float32, rank=2, ...],
        table: InputTensor[dtype=table_dtype, rank=table_rank, ...],
        slot_idx: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ):
        """Does nothing.

        Parameters:
            dtype: Element type of the ring.
            pooled_rank: Rank of `pooled`.
            ids_rank: Rank of `closed_pool`.
            rank: Rank of `k` and `gate`.
            table_dtype: Element type of `table`.
            table_rank: Rank of `table`.
            target: Device the op runs on.

        Args:
            pooled: Output, left as it is.
            closed_pool: Output, left as it is.
            tail: The ring, left as it is.
            k: Keys, not read.
            gate: Gate scores, not read.
            ape: Position embedding, not read.
            table: Positions or row offsets, not read.
            slot_idx: Ring slots, not read.
            ctx: Device context.
        """
        pass


@extensibility.register("kpool_graph.noop.stash")
struct NoopStash:
    """Stands for `seed_tail`."""

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        tail: MutableInputTensor[dtype=dtype, rank=4, ...],
        k: InputTensor[dtype=dtype, rank=2, ...],
        gate: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ):
        """Does nothing.

        Parameters:
            dtype: Element type of the ring.
            target: Device the op runs on.

        Args:
            tail: The ring, left as it is.
            k: Keys, not read.
            gate: Gate scores, not read.
            ctx: Device context.
        """
        pass


@extensibility.register("kpool_graph.noop.rows")
struct NoopRows:
    """Stands for `compress` and `expand_topk`."""

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString
    ](
        result: OutputTensor[dtype=dtype, rank=2, ...],
        rows: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ):
        """Does nothing.

        Parameters:
            dtype: Element type of both.
            target: Device the op runs on.

        Args:
            result: Output, left as it is.
            rows: Keys or pool ids, not read.
            ctx: Device context.
        """
        pass
