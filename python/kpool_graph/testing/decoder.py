"""The Llama of examples/serve in NumPy: every token again at every step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import reference
from ..reference import Array


@dataclass(frozen=True)
class Answer:
    """What a model answers.

    Attributes:
        tokens: The tokens that it chooses, greedily.
        margin: How much larger the chosen logit is than the next one, at the closest
            of these choices. Rounding errors below half of it change nothing.
    """

    tokens: list[int]
    margin: float


class ReferenceDecoder:
    """The decoder without cache, batch or ring: a forward pass over all tokens.

    A token at the end of a pool reads the pooled key of its pool, whose members are
    looked up in the whole sequence.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Array],
        *,
        dtype: npt.DTypeLike = np.float64,
        keeps_ring: bool = True,
    ) -> None:
        """Takes a checkpoint.

        Args:
            config: Its config.json.
            weights: Its weights by name, float32.
            dtype: What to compute in. float32 shows how far rounding can go.
            keeps_ring: False for a decoder that is broken on purpose: what an earlier
                step left for a pool to be closed is lost, and reads as zeros.
        """
        self._config = config
        self._weights = {name: value.astype(dtype) for name, value in weights.items()}
        self._keeps_ring = keeps_ring

    @classmethod
    def load(cls, folder: Path, **options: Any) -> ReferenceDecoder:
        """Reads a checkpoint.

        Args:
            folder: Holds config.json and model.safetensors.
            **options: See `ReferenceDecoder`.

        Returns:
            The decoder.

        Raises:
            OSError: If a file is missing.
        """
        from safetensors.numpy import load_file

        config = json.loads((folder / "config.json").read_text())
        return cls(config, load_file(folder / "model.safetensors"), **options)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Decodes greedily.

        Args:
            prompt: Token ids, at least one.
            max_tokens: Tokens to decode; no token ends the answer.

        Returns:
            The answer.
        """
        tokens = list(prompt)
        margin = np.inf
        for _ in range(max_tokens):
            logits = self.logits(tokens, steps_from=len(prompt))
            second, first = np.partition(logits, -2)[-2:]
            margin = min(margin, float(first - second))
            tokens.append(int(logits.argmax()))
        return Answer(tokens[len(prompt) :], margin)

    def logits(self, tokens: Sequence[int], steps_from: int) -> Array:
        """Runs the model.

        Args:
            tokens: Token ids of the sequence so far.
            steps_from: Position from which each token is a step of its own; those
                before came in one step.

        Returns:
            `[vocab_size]`, of the last token.
        """
        hidden = self._weights["model.embed_tokens.weight"][np.asarray(tokens)]
        for layer in range(self._config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm")
            hidden = hidden + self._attention(normed, prefix + "self_attn.")
            normed = self._norm(hidden, prefix + "post_attention_layernorm")
            hidden = hidden + self._mlp(normed, prefix + "mlp.")
            hidden = hidden + self._memory(hidden, prefix + "kpool.", steps_from)
        return self._linear(self._norm(hidden[-1], "model.norm"), "lm_head")

    def _linear(self, x: Array, name: str) -> Array:
        return np.asarray(x @ self._weights[name + ".weight"].T)

    def _norm(self, x: Array, name: str) -> Array:
        square = (x * x).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"]
        return np.asarray(x / np.sqrt(square) * self._weights[name + ".weight"])

    def _mlp(self, x: Array, prefix: str) -> Array:
        gate = self._linear(x, prefix + "gate_proj")
        up = self._linear(x, prefix + "up_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * up, prefix + "down_proj")

    def _attention(self, x: Array, prefix: str) -> Array:
        heads = self._config["num_attention_heads"]
        kv_heads = self._config["num_key_value_heads"]
        size = self._config["head_dim"]
        q, k, v = (
            self._linear(x, prefix + name).reshape(len(x), -1, size)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        k, v = (
            np.repeat(each, heads // kv_heads, axis=1) for each in (self._rope(k), v)
        )
        scores = np.einsum("qhd,khd->hqk", self._rope(q), k) / np.sqrt(size)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        read = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return self._linear(read, prefix + "o_proj")

    def _rope(self, x: Array) -> Array:
        half = x.shape[-1] // 2
        rate = self._config["rope_theta"] ** (-np.arange(half) / half)
        angle = np.arange(len(x))[:, np.newaxis, np.newaxis] * rate
        cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def _memory(self, x: Array, prefix: str, steps_from: int) -> Array:
        keys = self._linear(x, prefix + "k_proj")
        gates = self._linear(x, prefix + "gate_proj")
        ape = self._weights[prefix + "ape"]
        read = np.zeros_like(keys)
        kpool = len(ape)
        for last in range(kpool - 1, len(x), kpool):
            members = slice(last - kpool + 1, last + 1)
            key, gate = keys[members].copy(), gates[members].copy()
            if not self._keeps_ring and last >= steps_from:
                key[:-1], gate[:-1] = 0, 0
            read[last] = reference.pool(key, gate, ape)
        return self._linear(read, prefix + "o_proj")
