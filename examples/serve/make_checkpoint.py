"""Makes a tiny random checkpoint of kpool_llama, with its tokenizer, offline.

    python examples/serve/make_checkpoint.py FOLDER [--kpool KPOOL]

The weights are seeded, so every run makes the same ones. A token is a word: `w3` to
`w511`, separated by spaces.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512
SPECIAL = ("<s>", "</s>", "<unk>")
HIDDEN = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
KPOOL_HEAD_DIM = 32


def config(kpool: int) -> dict[str, Any]:
    """Returns the contents of config.json: a Llama's, and the ring's two sizes."""
    return {
        "architectures": ["KPoolLlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "kpool": kpool,
        "kpool_head_dim": KPOOL_HEAD_DIM,
    }


def weights(settings: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Draws the weights, named as Llama checkpoints name them."""
    random = np.random.default_rng(seed=0)

    def draw(*shape: int, scale: float = 0.15) -> np.ndarray[Any, Any]:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    inner = settings["intermediate_size"]
    drawn = {
        "model.embed_tokens.weight": draw(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": draw(VOCABULARY, HIDDEN),
    }
    # Completions are text, and special tokens have none: never choose them.
    drawn["lm_head.weight"][: len(SPECIAL)] = 0
    for layer in range(settings["num_hidden_layers"]):
        values = {
            "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            "self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            "mlp.gate_proj.weight": draw(inner, HIDDEN),
            "mlp.up_proj.weight": draw(inner, HIDDEN),
            "mlp.down_proj.weight": draw(HIDDEN, inner),
            "kpool.k_proj.weight": draw(KPOOL_HEAD_DIM, HIDDEN),
            "kpool.gate_proj.weight": draw(KPOOL_HEAD_DIM, HIDDEN),
            "kpool.o_proj.weight": draw(HIDDEN, KPOOL_HEAD_DIM, scale=0.4),
            "kpool.ape": draw(settings["kpool"], KPOOL_HEAD_DIM, scale=0.5),
        }
        drawn |= {
            f"model.layers.{layer}.{name}": value for name, value in values.items()
        }
    return drawn


def make_checkpoint(folder: Path, kpool: int = 4) -> None:
    """Writes the checkpoint.

    Args:
        folder: Where; made if there is none.
        kpool: Tokens per pool.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(kpool)
    save_file(weights(settings), folder / "model.safetensors")

    words = [*SPECIAL, *(f"w{index}" for index in range(len(SPECIAL), VOCABULARY))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))

    start, end, unknown = SPECIAL
    for name, contents in (
        ("config.json", settings),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1}),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": start,
                "eos_token": end,
                "unk_token": unknown,
                "model_max_length": settings["max_position_embeddings"],
            },
        ),
    ):
        (folder / name).write_text(json.dumps(contents, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kpool", type=int, default=4, help="tokens per pool")
    arguments = parser.parse_args()
    make_checkpoint(arguments.folder, arguments.kpool)
    print(f"Wrote {arguments.folder}.")


if __name__ == "__main__":
    main()
