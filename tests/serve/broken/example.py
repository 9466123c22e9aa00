"""What the broken architectures are made of: the example, and a step's row ids."""

import sys

from max import tree
from max.nn.kv_cache import RecurrentStateInputsPerDevice

from kpool_graph.serve import llama_architecture
from kpool_graph.serve_demo import example_folder

sys.path.append(str(example_folder()))

from kpool_llama import Config, Model

__all__ = ["Config", "Model", "architecture", "ring_rows"]


def architecture(config, model):
    """Describes a broken model under the name that the checkpoints have."""
    return llama_architecture("KPoolLlamaForCausalLM", config, model)


def ring_rows(model_inputs):
    """Returns each leaf's `[num_layers, batch]` row ids, which the step will read."""
    return [
        leaf.live_row_ids.to_numpy()
        for state in tree.leaves(
            model_inputs.kv_cache_inputs, leaf=RecurrentStateInputsPerDevice
        )
        if isinstance(state, RecurrentStateInputsPerDevice)
        for leaf in state.leaves
    ]
