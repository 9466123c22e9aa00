"""A Llama whose layers each end with a module that uses a ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from max import tree
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorValue, Type, ops
from max.graph import Module as GraphModule
from max.graph.weights import WeightsFormat
from max.nn.kv_cache import KVCacheParams, MultiKVCacheParams, PagedCacheValues
from max.nn.layer import Module
from max.pipelines.architectures.llama3 import weight_adapters
from max.pipelines.architectures.llama3.batch_processor import Llama3BatchProcessor
from max.pipelines.architectures.llama3.llama3 import Llama3
from max.pipelines.architectures.llama3.model import Llama3Model
from max.pipelines.architectures.llama3.model_config import Llama3Config
from max.pipelines.context import TextContext
from max.pipelines.kv_cache.memory_planner import PagedMemoryPlanner
from max.pipelines.lib import (
    ModelInputs,
    ModelOutputs,
    SupportedArchitecture,
    TextTokenizer,
)
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec
from max.pipelines.modeling.types import PipelineTask

from ._cache import ATTENTION, RingInputs, ring_cache, split_inputs
from ._graph import with_kernels


@dataclass(kw_only=True)
class RingLlamaConfig(Llama3Config):
    """The config of a Llama with rings. A subclass sets `mixer`.

    The checkpoint's `config.json` has two keys more than a Llama's: `kpool` and
    `kpool_head_dim`.

    Attributes:
        mixer: Makes the module that follows each layer, from this config. It is called
            as `mixer(hidden, tail, slot_idx, input_row_offsets, cache_lengths)` with
            `[total_tokens, hidden_size]` hidden states and operands of
            `ragged_update`, and returns what is added to the hidden states. Its
            weights are `model.layers.<i>.kpool.*` in the checkpoint.
        kpool: Tokens per pool.
        kpool_head_dim: Channels per key.
    """

    DEFAULT_ENCODING: ClassVar[Any] = "float32"
    SUPPORTED_ENCODINGS: ClassVar[set[Any]] = {"float32", "bfloat16"}
    mixer: ClassVar[Callable[[Any], Module]]

    kpool: int = 0
    kpool_head_dim: int = 0

    @classmethod
    def construct_kv_params(  # type: ignore[override]
        cls, huggingface_config: Any, *args: Any, **options: Any
    ) -> MultiKVCacheParams:
        """Declares the attention cache and the ring, in the model's dtype.

        Args:
            huggingface_config: The checkpoint's config.
            *args: See `Llama3Config.construct_kv_params`.
            **options: Likewise.

        Returns:
            The cache tree.

        Raises:
            ValueError: If the checkpoint's config lacks a key, or if the ring is
                refused (see `ring_cache`).
        """
        attention = super().construct_kv_params(huggingface_config, *args, **options)
        return ring_cache(
            attention,
            num_layers=cls.get_num_layers(huggingface_config),
            kpool=_setting(huggingface_config, "kpool"),
            head_dim=_setting(huggingface_config, "kpool_head_dim"),
            dtype=attention.dtype,
        )

    @classmethod
    def initialize_from_config(
        cls, pipeline_config: Any, huggingface_config: Any, *args: Any, **options: Any
    ) -> Any:
        """Reads the checkpoint's config, the ring's sizes included.

        Args:
            pipeline_config: What MAX was started with.
            huggingface_config: The checkpoint's config.
            *args: See `Llama3Config.initialize_from_config`.
            **options: Likewise.

        Returns:
            The config.
        """
        config = super().initialize_from_config(
            pipeline_config, huggingface_config, *args, **options
        )
        config.kpool = _setting(huggingface_config, "kpool")
        config.kpool_head_dim = _setting(huggingface_config, "kpool_head_dim")
        return config


def _setting(huggingface_config: Any, name: str) -> int:
    value = getattr(huggingface_config, name, None)
    if not isinstance(value, int):
        raise ValueError(f"config.json must have {name}, an integer, got {value!r}")
    return value


class RingLlama(Llama3):
    """The decoder: Llama's, with `config.mixer` after every layer."""

    def __init__(self, config: RingLlamaConfig) -> None:
        """Declares the weights.

        Args:
            config: The config; its `kv_params` are a `ring_cache`.
        """
        # Llama3Config says that they are one attention cache.
        self._cache = cast(MultiKVCacheParams, config.kv_params)
        attention = cast(KVCacheParams, self._cache.children[ATTENTION])
        super().__init__(dataclasses.replace(config, kv_params=attention))
        for layer in self.layers:
            layer.kpool = type(config).mixer(config)

    def __call__(  # type: ignore[override]
        self,
        tokens: TensorValue,
        kv_collection: PagedCacheValues,
        ring: RingInputs,
        return_n_logits: TensorValue,
        input_row_offsets: TensorValue,
    ) -> tuple[TensorValue, ...]:
        """Builds the forward pass.

        Args:
            tokens: `[total_tokens]` int64.
            kv_collection: The attention cache.
            ring: The rings.
            return_n_logits: See `Llama3`.
            input_row_offsets: `[batch + 1]` uint32, first token of each request.

        Returns:
            The logits, and what else `Llama3` returns.
        """
        hidden = self.embed_tokens(tokens)
        if self.embedding_multiplier != 1.0:
            hidden = hidden * float(self.embedding_multiplier)
        for index, layer in enumerate(self.layers):
            hidden = layer(
                ops.constant(index, DType.uint32, device=DeviceRef.CPU()),
                hidden,
                kv_collection,
                freqs_cis=self.rope.freqs_cis,
                input_row_offsets=input_row_offsets,
            )
            tail, slot_idx = ring.layer(index)
            hidden = hidden + layer.kpool(
                hidden, tail, slot_idx, input_row_offsets, kv_collection.cache_lengths
            )
        return self._postprocess_logits(hidden, input_row_offsets, return_n_logits)

    def trace(
        self,
        *input_types: Type[Any],
        name: str | None = None,
        module: GraphModule | None = None,
        custom_extensions: Iterable[Path] = (),
        is_device_graph: bool = False,
    ) -> Graph:
        """Traces the graph. `Llama3.trace` would lose the ring on the way.

        Args:
            *input_types: The leaves of `input_tree` of the whole cache.
            name: The graph's name.
            module: Where it goes; a new module if not given.
            custom_extensions: Kernel libraries of the graph.
            is_device_graph: Whether to build a device graph.

        Returns:
            The graph.
        """
        _, structure = tree.flatten(self.input_tree(self._cache))

        def forward(*inputs: Any) -> tuple[TensorValue, ...]:
            named: Any = tree.unflatten(structure, iter(inputs))
            batch = named["batch"]
            (kv_collection,), ring = split_inputs(named["kv"])
            return self(
                batch["tokens"].tensor,
                kv_collection,
                ring,
                batch["return_n_logits"].tensor,
                batch["row_offsets"].tensor,
            )

        return Graph(
            name or type(self).__qualname__,
            forward,
            input_types=input_types,
            custom_extensions=list(custom_extensions),
            module=module,
            is_device_graph=is_device_graph,
        )


class RingLlamaModel(Llama3Model):
    """The pipeline model. A subclass sets `model_config_cls` to its config."""

    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Runs a step, once the rows that MAX copies and clears for it are ready.

        Args:
            model_inputs: See `Llama3Model.execute`.

        Returns:
            Likewise.
        """
        for device in self.devices:
            # Copies are queued, and a graph on a CPU does not wait for them.
            if device.is_host:
                device.synchronize()
        return super().execute(model_inputs)

    def _create_model_config(self, state_dict: dict[str, Any]) -> Any:
        # Llama3Model's own makes a Llama3Config, whatever model_config_cls is.
        config = type(self).model_config_cls.initialize(
            self.pipeline_config, max_seq_len=self.max_seq_len
        )
        config.finalize(
            huggingface_config=self.huggingface_config,
            state_dict=state_dict,
            norm_method=self.norm_method,
            attention_bias=self.attention_bias,
            return_logits=self.return_logits,
            return_hidden_states=self.return_hidden_states,
        )
        return config

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Describes the decoder, with our kernels.

        Args:
            model_config: The config.

        Returns:
            The decoder's graph, by its role.
        """
        decoder = RingLlama(model_config)
        decoder.load_state_dict(
            self.state_dict,
            override_quantization_encoding=True,
            weight_alignment=1,
            strict=True,
        )
        spec = GraphSpec(
            decoder,
            "ring_llama",
            self._bind_graph_inputs(decoder.input_tree(self.kv_params)),
            weights=decoder.state_dict(),
        )
        return {GraphRole.DECODER: with_kernels(spec)}


def llama_architecture(
    name: str,
    config: type[RingLlamaConfig],
    model: type[RingLlamaModel],
    **options: Any,
) -> SupportedArchitecture:
    """Describes a Llama with rings to MAX, for a package's `ARCHITECTURES`.

    Args:
        name: What the checkpoints' `config.json` calls it under `architectures`.
        config: Its config.
        model: Its pipeline model, whose `model_config_cls` is that config.
        **options: Any field of `SupportedArchitecture`, instead of the one here.

    Returns:
        The architecture: Llama's weights, tokenizer and batches, and state that a
        reused prefix restores. The overlap scheduler and graph capture stay off: no
        test has them on.
    """
    fields: dict[str, Any] = {
        "name": name,
        "example_repo_ids": [],
        "default_encoding": config.DEFAULT_ENCODING,
        "supported_encodings": config.SUPPORTED_ENCODINGS,
        "pipeline_model": model,
        "tokenizer": TextTokenizer,
        "context_type": TextContext,
        "default_weights_format": WeightsFormat.safetensors,
        "weight_adapters": {
            WeightsFormat.safetensors: weight_adapters.convert_safetensor_state_dict
        },
        "task": PipelineTask.TEXT_GENERATION,
        "config": config,
        "batching": Llama3BatchProcessor,
        "memory_planner": PagedMemoryPlanner,
        # That rows may be saved; whether they are is ring_cache's choice.
        "checkpoints_recurrent_state": True,
        "supports_overlap_scheduler": False,
        "supports_device_graph_capture": False,
    }
    return SupportedArchitecture(**(fields | options))
