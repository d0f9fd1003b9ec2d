"""Llama-family decoders (Llama, Mistral, Qwen2, Qwen3) as one forward over a block of rows.

Each row's bits depend on its own token, ancestors and prefix alone, whatever else is in the block (see
"Numerics" in CONTRIBUTING.md): that makes tree decoding equal plain decoding bit for bit.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import esp_kernels
from esp_decode.cache import Cache
from esp_decode.tree import Block


class Linear:
    """y = x W^T + b; packed for `linear_rows` on the CPU, cuBLAS elsewhere."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.out_features = weight.shape[0]
        self.bias = bias
        self.packed = weight.device.type == "cpu"
        self.weight = esp_kernels.pack_linear(weight) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return esp_kernels.linear_rows(x, self.weight, self.out_features, self.bias)
        return F.linear(x, self.weight, self.bias)


@dataclass
class Layer:
    """Weights of one decoder layer; q, k, v and gate, up are fused into one product each."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    window: int | None


@dataclass
class Model:
    """A frozen causal language model. `config` is the transformers config that it was loaded with."""

    config: Any
    embedding: torch.Tensor  # [V, E]
    layers: list[Layer]
    norm: torch.Tensor
    lm_head: Linear
    inverse_frequencies: torch.Tensor  # [R / 2] float32
    rope_scale: float
    eos_token_ids: frozenset[int]

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    @functools.cached_property
    def vocab_mean(self) -> torch.Tensor:
        """[E] float32, the mean of the embedding table."""
        return self.embedding.float().mean(dim=0)

    @property
    def context(self) -> int:
        return self.config.max_position_embeddings

    def new_cache(self, batch: int, capacity: int) -> Cache:
        heads, head_dim = self.config.num_key_value_heads, self.config.head_dim
        shape = (len(self.layers), batch, capacity, heads, head_dim)
        return Cache.empty(shape, self.embedding, self.inverse_frequencies, self.rope_scale)

    def forward(self, block: Block, probe: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Runs the block behind the cached prefix and writes its K/V there.

        probe [B, k, E] float32; returns the normalised hidden states [B, T, E] for `lm_head`.
        """
        hidden = esp_kernels.embed_block(block.tokens, block.mask_ordinal, self.embedding, probe)
        update = None
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            x = self._add_and_norm(hidden, update, layer.attention_norm)
            x = self._attention(layer, x, block, k_cache, v_cache, cache)
            x = self._add_and_norm(hidden, x, layer.mlp_norm)
            update = layer.down(esp_kernels.swiglu(layer.gate_up(x)))
        return self._add_and_norm(hidden, update, self.norm)

    def _add_and_norm(
        self, hidden: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        if update is None:
            return esp_kernels.rms_norm(hidden, weight, eps)
        return esp_kernels.rms_norm(update, weight, eps, residual=hidden)

    def _attention(
        self,
        layer: Layer,
        x: torch.Tensor,
        block: Block,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = layer.qkv(x).unflatten(-1, (heads + 2 * kv_heads, self.config.head_dim))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = esp_kernels.rms_norm(q, layer.q_norm, self.config.rms_norm_eps)
            k = esp_kernels.rms_norm(k, layer.k_norm, self.config.rms_norm_eps)
        q = esp_kernels.rope_append(
            q, k, v, cache.cos, cache.sin, cache.prefix_len, block.depth, k_cache, v_cache
        )
        out, _ = esp_kernels.tree_attention(
            q, k_cache, v_cache, cache.prefix_len, block.ancestors, block.depth, window=layer.window
        )
        return layer.output(out.flatten(2))
