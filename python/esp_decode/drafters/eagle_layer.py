"""EAGLE's drafter: one decoder layer that continues the base model's hidden states (arXiv 2401.15077)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.functional import pad

import esp_kernels
from esp_decode.cache import Cache
from esp_decode.drafters.heads import open_heads
from esp_decode.model import Linear, Model
from esp_decode.weights import load_config, rotary


@dataclass(frozen=True)
class EagleLayer:
    """A Llama layer without its input norm over fc(embedding of a token, feature before it).

    A feature is the base model's hidden state as its LM head takes it, or the layer's guess of one; the base
    model's embedding and LM head serve the layer too.
    """

    config: Any
    embedding: torch.Tensor  # [V, E], the base model's
    fc: Linear
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    inverse_frequencies: torch.Tensor
    rope_scale: float

    @classmethod
    def load(cls, folder: Path, model: Model) -> "EagleLayer":
        """Reads a drafter in its published form. ValueError names what is missing or does not fit."""
        config = load_config(folder)
        vocab, width = model.embedding.shape
        for name, ours, its in (
            ("hidden size", config.hidden_size, width),
            ("vocabulary", config.vocab_size, vocab),
        ):
            if ours != its:
                raise ValueError(f"heads {str(folder)!r} are for a {name} of {ours}, the model has {its}")
        tensors = open_heads(folder, "model", model)
        q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        inner = config.intermediate_size
        layer, attention = "layers.0", "layers.0.self_attn"
        return cls(
            config=config,
            embedding=model.embedding,
            fc=tensors.linear(["fc"], [width], 2 * width),
            qkv=tensors.linear([f"{attention}.{p}_proj" for p in "qkv"], [q, kv, kv], width),
            output=tensors.linear([f"{attention}.o_proj"], [width], q),
            mlp_norm=tensors.get(f"{layer}.post_attention_layernorm.weight", width),
            gate_up=tensors.linear([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [inner, inner], width),
            down=tensors.linear([f"{layer}.mlp.down_proj"], [width], inner),
            **rotary(config, model.device),
        )

    def new_cache(self, batch: int, capacity: int) -> Cache:
        heads, head_dim = self.config.num_key_value_heads, self.config.head_dim
        return Cache.empty(
            (1, batch, capacity, heads, head_dim), self.embedding, self.inverse_frequencies, self.rope_scale
        )

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, parent: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Runs the last n rows of a block behind the cached prefix, whose rows before them have been run.

        tokens    [B, n] int32, -1 in padding rows, whose results mean nothing
        features  [B, n, E], the one before each token
        parent    [B, T] int32, of the whole block
        returns   [B, n, E], the guessed features behind the tokens
        """
        first = parent.shape[1] - tokens.shape[1]
        embedded = F.embedding(tokens.clamp(min=0), self.embedding)
        hidden = self.fc(torch.cat([embedded, features], dim=-1))
        x = self._attention(hidden, parent, first, cache)
        x = esp_kernels.rms_norm(x, self.mlp_norm, self.config.rms_norm_eps, residual=hidden)
        return hidden + self.down(esp_kernels.swiglu(self.gate_up(x)))

    def _attention(self, x: torch.Tensor, parent: torch.Tensor, first: int, cache: Cache) -> torch.Tensor:
        """Rows before `first` keep their K/V; what they would attend to is left out of the result."""
        depth, ancestors = esp_kernels.tree_metadata(parent)
        new_depth = depth.clone()
        new_depth[:, :first] = -1
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = self.qkv(x).unflatten(-1, (heads + 2 * kv_heads, self.config.head_dim))
        q, k, v = pad(qkv, (0, 0, 0, 0, first, 0)).split((heads, kv_heads, kv_heads), dim=2)
        k_cache, v_cache = cache.k[0], cache.v[0]
        q = esp_kernels.rope_append(
            q, k, v, cache.cos, cache.sin, cache.prefix_len, new_depth, k_cache, v_cache
        )
        out, _ = esp_kernels.tree_attention(q, k_cache, v_cache, cache.prefix_len, ancestors, depth)
        return self.output(out[:, first:].flatten(2))
