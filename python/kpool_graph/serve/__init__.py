"""The ring in a MAX pipeline architecture, for `max serve`.

`ring_cache` declares the ring beside the attention cache, so that MAX gives every
request its row, copies it and frees it. `split_inputs` finds it again in the graph.
`RingLlama` and its config and model put a module of yours, which uses the ring, after
every layer of a Llama. docs/serving.md shows a whole architecture.
"""

try:
    import max.pipelines.lib  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f"kpool_graph.serve needs what MAX serves models with, but {error}. Install it"
        " with: pip install 'kpool-graph[serve]'"
    ) from error

from ._cache import RingInputs, ring_cache, split_inputs
from ._graph import pooled_by_token, with_kernels
from ._llama import RingLlama, RingLlamaConfig, RingLlamaModel, llama_architecture

__all__ = [
    "RingInputs",
    "RingLlama",
    "RingLlamaConfig",
    "RingLlamaModel",
    "llama_architecture",
    "pooled_by_token",
    "ring_cache",
    "split_inputs",
    "with_kernels",
]
