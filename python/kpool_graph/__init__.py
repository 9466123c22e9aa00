"""The k-pool tail ring for MAX graphs.

A k-pooled indexer keeps one key per `kpool` consecutive tokens of a request.
The ops here keep the tokens of each request's unfinished pool in a ring that
outlives the call: `seed_tail` after prefill, `tail_update` in decode.
"""

from ._library import KernelBuildError, kernels_path
from ._validate import OperandError
from ._versions import __version__
from .buffers import to_buffer, to_numpy
from .copies import copy_slots
from .ops import ragged_update, ring_close, seed_tail, tail_update
from .pools import compress, expand_topk, pool_row_offsets
from .ring import TailRing, min_ring_len
from .slots import SlotError, SlotPool

__all__ = [
    "KernelBuildError",
    "OperandError",
    "SlotError",
    "SlotPool",
    "TailRing",
    "__version__",
    "compress",
    "copy_slots",
    "expand_topk",
    "kernels_path",
    "min_ring_len",
    "pool_row_offsets",
    "ragged_update",
    "ring_close",
    "seed_tail",
    "tail_update",
    "to_buffer",
    "to_numpy",
]
