"""A Llama with a k-pooled memory: a tiny architecture for `max serve`.

After each layer every token makes a key and a gate score. The token that closes a pool
reads the pooled key back into its hidden state. Its pool-mates came on earlier steps,
as a rule, so without the ring it would read another key, and say other tokens.
"""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, TensorValue, Weight
from max.nn.layer import Module
from max.nn.linear import Linear

from kpool_graph import ragged_update
from kpool_graph.serve import (
    RingLlamaConfig,
    RingLlamaModel,
    llama_architecture,
    pooled_by_token,
)


class Mixer(Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.kpool = config.kpool
        hidden, head = config.hidden_size, config.kpool_head_dim
        device = config.devices[0]
        self.k_proj = Linear(hidden, head, config.dtype, device)
        self.gate_proj = Linear(hidden, head, config.dtype, device)
        self.o_proj = Linear(head, hidden, config.dtype, device)
        self.ape = Weight("ape", DType.float32, (config.kpool, head), device)

    def __call__(
        self,
        hidden: TensorValue,
        tail: BufferValue,
        slot_idx: TensorValue,
        input_row_offsets: TensorValue,
        cache_lengths: TensorValue,
    ) -> TensorValue:
        tables = (input_row_offsets, cache_lengths)
        k, gate = self.k_proj(hidden), self.gate_proj(hidden)
        pooled, _ = ragged_update(
            tail, k, gate, self.ape, *tables, slot_idx, kpool=self.kpool
        )
        tokens = hidden.shape[0]
        read = pooled_by_token(pooled, *tables, total_tokens=tokens, kpool=self.kpool)
        return self.o_proj(read)


class Config(RingLlamaConfig):
    mixer = Mixer


class Model(RingLlamaModel):
    model_config_cls = Config


ARCHITECTURES = [llama_architecture("KPoolLlamaForCausalLM", Config, Model)]
