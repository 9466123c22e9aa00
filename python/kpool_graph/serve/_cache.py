"""The ring as a child of MAX's cache tree: its declaration, its graph inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from max import tree
from max.dtype import DType
from max.graph import BufferValue, TensorValue
from max.nn.kv_cache import (
    KVCacheInputsPerDevice,
    KVCacheParamInterface,
    MultiKVCacheParams,
    PagedCacheValues,
    RecurrentStateInputsPerDevice,
    RecurrentStateParams,
    RecurrentStateRegion,
)

from .._validate import PLANES, RING_DTYPES, Problems

ATTENTION = "attention"
RING = "ring"
_LEAF_ID = "kpool/ring"


def ring_cache(
    attn_params: KVCacheParamInterface,
    *,
    num_layers: int,
    kpool: int,
    head_dim: int,
    dtype: DType,
    ring_len: int | None = None,
    scratch: bool | Literal["auto"] = "auto",
) -> MultiKVCacheParams:
    """Declares a ring for every layer beside a model's attention cache.

    Return it from an architecture config's `construct_kv_params`. MAX then draws a row
    for each layer of a request when it arrives, and frees them when it ends, is
    cancelled or is preempted; there is no slot to keep track of.

    A row is scratch or recurrent. Scratch rows belong to one request, and are not
    cleared: the ring needs no clearing. A prefix of the cache that another request
    reuses comes without their tokens, which is right only where it ends with a pool.
    Reused prefixes are whole pages, so that is where `kpool` divides the page size.
    Recurrent rows are saved at each page's end and copied to the request that reuses
    it: right for every `kpool`, but with prefix caching two rows a request and a copy
    a page, and prefill chunks that MAX cuts at page ends. MAX queues those copies, and
    a graph on a CPU does not wait for them: there a pipeline model that is no
    `RingLlamaModel` must call `device.synchronize()` before it executes.

    Args:
        attn_params: The cache that the model has without a ring.
        num_layers: Layers that have a ring.
        kpool: Tokens per pool.
        head_dim: Channels per key.
        dtype: float32, float16 or bfloat16, of the keys and gate scores.
        ring_len: Entries per row, at least `kpool` and the draft tokens of a
            speculative step; just that if not given.
        scratch: Whether rows are scratch; "auto" makes them scratch wherever that is
            right.

    Returns:
        The attention cache and the ring, as `split_inputs` takes them apart.

    Raises:
        OperandError: If a size or the dtype is not one of these, or if rows are to be
            scratch where a reused prefix may end inside a pool.
    """
    safe = kpool + attn_params.num_draft_tokens
    ring_len = safe if ring_len is None else ring_len
    problems = Problems("ring_cache")
    problems.require_at_least("num_layers", num_layers, 1)
    problems.require_at_least("kpool", kpool, 1)
    problems.require_at_least("head_dim", head_dim, 1)
    problems.require_dtype("dtype", dtype, RING_DTYPES)
    problems.require_ring_len(ring_len, kpool)
    if kpool <= ring_len < safe:
        problems.add(
            f"ring_len ({ring_len}) must be at least kpool + num_draft_tokens ({safe}),"
            " or be left out"
        )
    page_size = attn_params.page_size
    cut = attn_params.enable_prefix_caching and kpool >= 1 and page_size % kpool != 0
    if scratch not in ("auto", True, False):
        problems.add(f"scratch must be True, False or 'auto', got {scratch!r}")
    elif scratch is True and cut:
        problems.add(
            "scratch must be False or left out: prefix caching is on and page_size"
            f" ({page_size}) is no multiple of kpool ({kpool}), so a reused prefix"
            " would end inside a pool whose first tokens the ring never saw"
        )
    problems.raise_if_any()

    region = RecurrentStateRegion(
        leaf_id=_LEAF_ID,
        num_layers=num_layers,
        row_shape=(PLANES, ring_len, head_dim),
        dtype=dtype,
        scratch=not cut if scratch == "auto" else scratch,
    )
    ring = RecurrentStateParams(
        regions=(region,),
        devices=attn_params.devices,
        data_parallel_degree=attn_params.data_parallel_degree,
    )
    return MultiKVCacheParams.from_params({ATTENTION: attn_params, RING: ring})


@dataclass(frozen=True)
class RingInputs:
    """The rings of a model in the graph being built.

    Attributes:
        devices: MAX's inputs of the ring on each device.
    """

    devices: tuple[RecurrentStateInputsPerDevice[TensorValue, BufferValue], ...]

    def layer(self, index: int, device: int = 0) -> tuple[BufferValue, TensorValue]:
        """Returns the first and the last operand of `ragged_update` for one layer.

        All layers share the buffer, which is all of MAX's cache memory, seen as rows:
        attention pages lie between the rings. So take row ids from here alone; any
        other row may be somebody's keys and values. It may hold more than 2^32
        elements, which the ops' 64-bit addresses allow.

        Args:
            index: The layer, counted among those that have a ring.
            device: Index of the device.

        Returns:
            tail `[rows, 2, ring_len, head_dim]`, and slot_idx `[batch]` uint32, the
            row of each request.

        Raises:
            OperandError: If there is no such layer.
        """
        (leaf,) = self.devices[device].leaves
        layers = int(leaf.live_row_ids.shape[0])
        if not 0 <= index < layers:
            problems = Problems("ring.layer")
            problems.add(f"index must be below num_layers ({layers}), got {index}")
            problems.raise_if_any()
        return leaf.pool, leaf.live_row_id(index)


def split_inputs(
    kv_tree: Mapping[str, Any],
) -> tuple[list[PagedCacheValues], RingInputs]:
    """Takes the graph inputs of a `ring_cache` apart.

    Args:
        kv_tree: What MAX makes of its graph inputs: the `kv` of the input tree, or
            `kv_params.unflatten_kv_inputs(...)`.

    Returns:
        The attention cache of each device, and the rings.
    """
    attention = tree.leaves(kv_tree[ATTENTION], leaf=KVCacheInputsPerDevice)
    ring = tree.leaves(kv_tree[RING], leaf=RecurrentStateInputsPerDevice)
    return list(attention), RingInputs(tuple(ring))
